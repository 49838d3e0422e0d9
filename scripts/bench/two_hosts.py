"""Measures `sync`, `gtc`, `bmuf` and `htm` on two hosts with a slow network: frames/s, and bytes between the hosts.

    python scripts/bench/two_hosts.py [--gbits 1] [--rounds 3] [--steps 25] [--seconds 0.1485]

Runs four real learners, two on each host, in groups of two for `htm`. The hosts are network namespaces of this machine,
with a link of `--gbits` in each direction between them (see namespaces.py, needs root).

The model is the paper's, 24.3 M parameters (conf/model/lstm_htm_paper.yaml). Computing is emulated, because the
arithmetic of four learners on a few cores would hide the network. Each learner computes one gradient of a few random
examples before timing starts. A step reuses it and takes `--seconds` (for 2,048 frames on the paper's V100, as in
conf/workload/htm_lstm.yaml). Its buckets become ready evenly over that time without a forward pass before them, which
favours `sync`. Everything else is real: messages, encoding, updates, averages. Options are those of conf/strategy,
except for an initial τ that suits this gradient and blocks of `--steps` steps (25, the paper's smallest, is hardest for
them). Takes 2 GB of memory per learner and needs idle cores: encoding and updates slow down with busy ones, the
emulated computing and the network do not.

In each round all strategies take turns of `--steps` steps, in reverse order every other time, after a warm-up round. MB
are the kernel's count at the veth (with headers), both directions together. Next to it is the team's own count, from
which `bytes_sent` of a summary.json is made. All learners must end with the same weights. Prints medians (and ranges)
and ratios within a round. Exits with 1 if `bmuf` or `htm` has less than twice the frames/s of `sync`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from namespaces import LINK, run_on_two_hosts, sent_bytes
from torch import Tensor

from asr_am.distributed.cluster_config import Workload
from asr_am.distributed.flat_params import BucketHook, FlatParams
from asr_am.distributed.leases import Lease, StepResult
from asr_am.distributed.optimizer import Optimizer, OptimizerOptions
from asr_am.distributed.runtime.connect import connect
from asr_am.distributed.runtime.team import ProcessTeam
from asr_am.distributed.strategies.bmuf import Bmuf
from asr_am.distributed.strategies.gtc import Gtc
from asr_am.distributed.strategies.htm import Htm
from asr_am.distributed.strategies.sync import Sync
from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import Team
from asr_am.models.lstm import Lstm, LstmOptions
from asr_am.train.frame_loss import batch_loss

PER_HOST = 2  # learners per host and per group of htm
MODEL, INPUTS, OUTPUTS = LstmOptions(layers=5, cells=768, lookahead=3), 192, 3183
FRAMES, RATE, DENSITY = 2048.0, 1e-4, 0.01
TARGET, JUDGED = 2.0, ("bmuf", "htm")  # smallest ratio of frames/s to sync

Turns = dict[str, list[dict[str, float]]]  # by strategy: results of `take_turn` for each turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gbits", type=float, default=1.0, help="speed of the link in each direction")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=25, help="steps of a turn and of a block")
    parser.add_argument("--seconds", type=float, default=0.1485, help="emulated computing time per step")
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)  # for a learner: where to write its results
    options = parser.parse_args()
    if options.results is not None:
        learner(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "turns.json"
        if run_on_two_hosts([sys.executable, *sys.argv, "--results", str(results)], PER_HOST, options.gbits):
            sys.exit("a learner failed: see above")
        sys.exit(not report(json.loads(results.read_text())))


def learner(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    v100 = Workload("htm_lstm", seconds_per_batch={"v100": options.seconds}, emulate=True)
    team = connect(workload=v100, device="v100")
    g = one_gradient(team.rank)
    magnitude = statistics.mean(float(x) for x in team.gather(g.abs().mean()).values())
    strategies = build_all(team, options.steps, FRAMES * magnitude / DENSITY)
    turns: Turns = {name: [] for name in strategies}
    for trial in range(1 + options.rounds):
        for name in list(strategies)[:: -1 if trial % 2 else 1]:
            turn = take_turn(strategies[name], g, options.steps)
            if trial:  # the first round warms up
                turns[name].append(turn)
    for strategy in strategies.values():
        check_equal(strategy)
    if team.rank == 0:
        options.results.write_text(json.dumps(turns))
    team.close()


def new_model() -> tuple[Lstm, FlatParams]:
    torch.manual_seed(0)
    model = Lstm(MODEL, INPUTS, OUTPUTS)
    return model, FlatParams(model)


def one_gradient(rank: int) -> Tensor:
    """Returns a gradient g [N] of the common initial model on random examples of this learner."""
    model, params = new_model()
    torch.manual_seed(1 + rank)
    x_BTF, targets_BT = torch.randn(4, 21, INPUTS), torch.randint(0, OUTPUTS, (4, 21))
    (batch_loss(model, x_BTF, None, targets_BT)[0] / targets_BT.numel()).backward()
    return params.g


def build_all(team: ProcessTeam, steps: int, threshold: float) -> dict[str, Strategy]:
    """Builds each strategy with weights of its own. `threshold` is the initial τ."""

    def build(kind: Callable[..., Strategy], **choices: float) -> Strategy:
        params = new_model()[1]
        optimizer = Optimizer(params, OptimizerOptions())
        optimizer.lr = RATE
        return kind(params, optimizer, team, **choices)

    gtc = {"threshold": threshold, "density": DENSITY}
    return {
        "sync": build(Sync),
        "gtc": build(Gtc, **gtc),
        "bmuf": build(Bmuf, block_size=steps),
        "htm": build(Htm, block_size=steps, group_size=PER_HOST, **gtc),
    }


def take_turn(strategy: Strategy, g: Tensor, steps: int) -> dict[str, float]:
    """Returns per step: `seconds`, and bytes between the hosts by the kernel's (`wire`) and by our count (`own`)."""
    team, params = strategy.team, strategy.params

    def gradient(on_bucket: BucketHook | None) -> StepResult:
        def ready(begin: int, end: int) -> None:
            params.g[begin:end] = g[begin:end]
            if on_bucket is not None:
                on_bucket(begin, end)

        params.notify_all_buckets(ready)
        return StepResult(Lease(0, 0.0, 0.0, FRAMES), FRAMES, 1, RATE, torch.zeros(()), torch.zeros(()))

    closure = team.timed(gradient)
    before, begin = between_hosts(team), time.perf_counter()
    for _ in range(steps):
        strategy.step(closure)
    after, seconds = between_hosts(team), time.perf_counter() - begin
    wire, own = ((after - before) / steps).tolist()
    return {"seconds": seconds / steps, "wire": wire, "own": own}


def between_hosts(team: Team) -> Tensor:
    """Returns the bytes sent between the hosts by the kernel's count and the team's. Acts as a barrier.

    The kernel counts per host, so each learner of a host reports its share.
    """
    own = sum(count for to, count in team.comm_stats.bytes_sent.items() if to // PER_HOST != team.rank // PER_HOST)
    mine = torch.tensor([(sent_bytes(LINK) or 0) / PER_HOST, own], dtype=torch.float64)
    return torch.stack(list(team.gather(mine).values())).sum(0)


def check_equal(strategy: Strategy) -> None:
    """Raises RuntimeError unless all learners have the same finite weights."""
    w = strategy.params.w.double()
    found = strategy.team.gather(torch.stack([w.sum(), w.norm()]))
    if not all(torch.equal(found[0], other) and other.isfinite().all() for other in found.values()):
        raise RuntimeError(f"{strategy.name}: learners have different weights, or infinite ones: {found}")


def report(turns: Turns) -> bool:
    """Prints the table and returns True if the target is met."""
    print(
        f"{'':5} {'frames/s':26} {'x sync':20} {'MB a step':>10} {'own count':>10} {'x sync':>7} {'Mbit/s a way':>13}"
    )
    rates = {name: [2 * PER_HOST * FRAMES / turn["seconds"] for turn in found] for name, found in turns.items()}
    wires = {name: statistics.median(turn["wire"] for turn in found) for name, found in turns.items()}
    ratios = {}
    for name, found in turns.items():
        faster = [a / b for a, b in zip(rates[name], rates["sync"], strict=True)]
        ratios[name] = statistics.median(faster)
        own = statistics.median(turn["own"] for turn in found)
        each_way = statistics.median(4 * turn["wire"] / turn["seconds"] for turn in found)
        print(
            f"{name:5} {spread(rates[name], ',.0f'):26} {spread(faster, '.2f'):20} {wires[name] / 1e6:10.2f} "
            f"{own / 1e6:10.2f} {wires[name] / wires['sync']:7.3f} {each_way / 1e6:13.0f}"
        )
    worst = min(JUDGED, key=lambda name: ratios[name])
    print(f"ratio {ratios[worst]:.2f}, of {worst} (target: at least {TARGET})")
    return ratios[worst] >= TARGET


def spread(values: list[float], form: str) -> str:
    """Formats median, minimum and maximum."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


if __name__ == "__main__":
    main()
