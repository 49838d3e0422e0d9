"""Measures Parallax on two hosts with a slow network: words/s of the LSTM language model, and bytes next to Table 3.

    python scripts/bench/parallax_hosts.py [--learners 4] [--gbits 1] [--rounds 5] [--steps 3] [--sentences 2] ...

`--learners` processes on each host (namespaces.py, needs root) train asr_am.models.lstm_lm with its sampled softmax on
batches of `--sentences` sentences of 8 words, drawn by Zipf's law from 200,000. After a warm-up round, all methods take
turns of `--steps` steps in each round, in reverse order every other time. A turn ends when all servers have applied the
last update. All methods clip by the norm of the whole gradient and use SGD. The methods (Kim et al., 2018):

    all-reduce         all parameters, as without Parallax
    all-gather         sparse gradients from each learner to every other, with the library's all-gather: the paper's MPI
    all-gather, ring   the same with gloo's ring, which loads the link less
    servers            all parameters on servers, one on each host: BASE of Table 4
    +HYB               dense parameters by all-reduce. From here on, the plan is that of Parallax
    +LA                gradients are merged on each host before they go to the servers
    +OPAU              norm and clipping on the servers instead of the chief worker
    +OPSW              rows are cast to bfloat16 before sending instead of after
    gather at workers  +OPSW, but workers pull all rows and select theirs. No other method does this, not even BASE, as
                       TensorFlow's embedding_lookup also runs next to the parameter. Shows the gain of moving a gather

All learners share a few cores. These compute much less per byte than GPUs, which would hide the network. Hence the
workload has little to compute per byte: short batches with many samples (most of the traffic is their rows, whose
arithmetic grows with the words of a batch), few cells, SGD. Rows are half as wide as in the paper. With narrower rows,
fixed costs dominate a step and methods differ less (--cells 256 --projection 128). Network, messages and merging are
real. All methods are in memory at once, which takes 17 GB.

Bytes are those of a learner and step, as Table 3 counts each kind:

    all-reduce   Bytes sent. For the method all-reduce, the kernel's count on the link and inside hosts, with headers.
                 For dense parameters next to sparse ones, by the formula.
    rows         Values sent and received, by the library's count. With local aggregation, a learner sends to the chief
                 of its host. Table 3 omits what chiefs send for others, so the first learner of each host is left out.

α is that of the plan, from the first batch. "sent" is everything that the kernel saw a learner send, with row numbers
and headers. "link" is the traffic between the hosts, the sum of both directions.

Exits with 1 if +OPSW has less than 2.5 x the words/s of the faster all-gather, or not more than servers, or if bytes
differ by more than 10 % from Table 3.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import namespaces
import torch
import torch.distributed as dist
from torch import Tensor, nn

from asr_am import parallax
from asr_am.distributed.runtime.connect import connect
from asr_am.distributed.runtime.team import ProcessTeam
from asr_am.distributed.runtime.worker_process import end_process
from asr_am.distributed.team import Gather, Message, Team
from asr_am.models.lstm_lm import IGNORED, LstmLm, LstmLmOptions
from asr_am.parallax import Config, Runner
from asr_am.parallax.placement import transfer

WORDS = 8  # of a sentence
TARGET, TOLERANCE = 2.5, 0.10
SPARSE = ("embedding.weight", "output.weight", "bias.weight")

BASE = Config(hybrid=False, local_aggregation=False, after_aggregation=False, clip_norm=1.0)
HYB = replace(BASE, hybrid=True)
LA = replace(HYB, local_aggregation=True)
OPAU = replace(LA, after_aggregation=True)
OPSW = replace(OPAU, wire="bfloat16")
GATHER = Config(path="all-gather", clip_norm=1.0)
RING, LAST = "all-gather, ring", "+OPSW"
METHODS = {
    "all-reduce": Config(dense=SPARSE, clip_norm=1.0), "all-gather": GATHER, RING: GATHER, "servers": BASE, "+HYB": HYB,
    "+LA": LA, "+OPAU": OPAU, LAST: OPSW, "gather at workers": replace(OPSW, gather_on_servers=False),
}  # fmt: skip


@dataclass
class MethodResult:
    """Measurements of one method, one entry for each turn.

    Attributes:
        words: Words per second.
        sent: Bytes per step that a learner sent, by the kernel's count.
        link: Bytes per step between the hosts.
        counted: Bytes per step of a learner, counted as in Table 3.
        formula: The same by the formulas of Table 3.
    """

    words: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    link: list[float] = field(default_factory=list)
    counted: list[float] = field(default_factory=list)
    formula: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learners", type=int, default=4, help="learners on each host")
    parser.add_argument("--gbits", type=float, default=1.0, help="bandwidth of the link in each direction")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds")
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn")
    parser.add_argument("--sentences", type=int, default=2, help="sentences of a learner's batch, 8 words each")
    parser.add_argument("--vocabulary", type=int, default=200_000, help="words of the vocabulary")
    parser.add_argument("--samples", type=int, default=8192, help="samples of the softmax")
    parser.add_argument("--cells", type=int, default=320, help="LSTM cells")
    parser.add_argument("--projection", type=int, default=256, help="dimension of the LSTM's projection")
    parser.add_argument("--embedding", type=int, default=16, help="dimension of the input embedding")
    spare = [name for name in METHODS if name not in ("all-gather", RING, "servers", LAST)]
    parser.add_argument("--without", nargs="+", choices=spare, default=[], help="methods to leave out, to save memory")
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)  # written by learner 0
    options = parser.parse_args()
    if options.results is not None:
        learner(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        results_file = Path(folder) / "results.json"
        command = [sys.executable, *sys.argv, "--results", str(results_file)]
        if namespaces.run_on_two_hosts(command, options.learners, options.gbits):
            sys.exit("the learners failed; see their messages above")
        results = {name: MethodResult(**result) for name, result in json.loads(results_file.read_text()).items()}
    sys.exit(not report(results))


def report(results: dict[str, MethodResult]) -> bool:
    """Prints the table. Returns True if all targets are met."""
    print(f"{'':18}{'words/s':>9} {'least':>8} {'most':>8}  x all-gather  x ring   MB/step: Table 3   counted", end="")
    print("              sent      link")
    off = {}
    for name, result in results.items():
        counted, sent, link = (statistics.median(values) / 1e6 for values in (result.counted, result.sent, result.link))
        off[name] = 1e6 * counted / result.formula - 1
        words = f"{statistics.median(result.words):9.1f} {min(result.words):8.1f} {max(result.words):8.1f}"
        gains = f"{ratio(result, results['all-gather']):12.2f} {ratio(result, results[RING]):7.2f}"
        print(f"{name:18}{words}  {gains}  {result.formula / 1e6:17.3f} {counted:9.3f} {off[name]:+7.2%}", end="")
        print(f" {sent:9.3f} {link:9.3f}")
    base = max(("all-gather", RING), key=lambda name: statistics.median(results[name].words))
    gain, ahead = ratio(results[LAST], results[base]), ratio(results[LAST], results["servers"])
    worst = max(off, key=lambda name: abs(off[name]))
    print(f"{LAST} has {gain:.2f} x the words/s of {base}, the faster one (target: at least {TARGET})")
    print(f"{LAST} has {ahead:.2f} x the words/s of servers (target: more than 1)")
    print(f"bytes: at most {off[worst]:+.2%} from Table 3's, of {worst} (target: {TOLERANCE:.0%})")
    return gain >= TARGET and ahead > 1 and abs(off[worst]) <= TOLERANCE


def ratio(result: MethodResult, other: MethodResult) -> float:
    """Returns the ratio of words/s, the median over rounds."""
    return statistics.median(a / b for a, b in zip(result.words, other.words, strict=True))


# Learners.


def learner(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    team = connect(timeout=120)
    torch.manual_seed(team.rank)
    text = iter(zipf_batches(options))
    runners: dict[str, Runner] = {}
    results = {}
    for name in (name for name in METHODS if name not in options.without):
        runners[name] = runners["all-gather"] if name == RING else build(name, team, options)
        runners[name].run(next(text))
        results[name] = MethodResult(formula=table3(runners[name]))
    for trial in range(1 + options.rounds):
        for name in sorted(results, key=list(results).index, reverse=bool(trial % 2)):
            turn = take_turn(name, runners[name], team, [next(text) for _ in range(options.steps)])
            if trial:  # the first round warms up
                record(results[name], turn, name)
    for runner in runners.values():
        runner.__exit__(None, None, None)
    if team.rank == 0:
        print(runners[LAST].plan, end="\n\n", flush=True)
        options.results.write_text(json.dumps({name: vars(result) for name, result in results.items()}))
    team.close()
    end_process()


def zipf_batches(options: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (input, target) [B, T] forever."""
    frequency_V = 1.0 / torch.arange(1.0, options.vocabulary + 1)
    while True:
        words_BT = torch.multinomial(frequency_V, options.sentences * (WORDS + 1), replacement=True)
        words_BT = words_BT.view(options.sentences, WORDS + 1)
        yield words_BT[:, :-1], words_BT[:, 1:]


def summed_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, float]:
    """Returns the model's loss, a mean over words, as a sum."""
    words = float((batch[1] != IGNORED).sum())
    return model(*batch) * words, words


def build(name: str, team: ProcessTeam, options: argparse.Namespace) -> Runner:
    """Makes the single-device program and its Parallax runner."""
    config = METHODS[name]
    sizes = {size: getattr(options, size) for size in ("embedding", "cells", "projection", "samples")}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LstmLm(LstmLmOptions(**sizes), options.vocabulary)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prefixed = PrefixedTeam(team, f"{list(METHODS).index(name)}.")
    return parallax.get_runner(model, summed_loss, optimizer, cast(Team, prefixed), config)


class PrefixedTeam:
    """A team with prefixed message tags, so that several runners can share the real one.

    Attributes:
        ring: Uses gloo's all-gather, a ring that passes parts padded to equal length from neighbour to neighbour.
    """

    def __init__(self, team: ProcessTeam, prefix: str) -> None:
        self._team, self._prefix, self.ring = team, prefix, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._team, name)

    def start_all_gather(self, x: Tensor, lengths: Sequence[int] | None = None) -> Gather:
        return RingGather(x, lengths or [len(x)] * self.size) if self.ring else self._team.start_all_gather(x, lengths)

    def register_tag(self, tag: str, *lengths: int) -> None:
        self._team.register_tag(self._prefix + tag, *lengths)

    def send(self, to: int, tag: str, clock: int, *tensors: Tensor) -> None:
        self._team.send(to, self._prefix + tag, clock, *tensors)

    def recv(self, tag: str, source: int | None = None, timeout: float | None = None) -> Message | None:
        return self._team.recv(self._prefix + tag, source, timeout)


class RingGather:
    """A pending all-gather by gloo's ring."""

    def __init__(self, x: Tensor, lengths: Sequence[int]) -> None:
        padded = nn.functional.pad(x, (0, max(lengths) - len(x)))
        self._lengths, self._sent = lengths, padded
        self._received = [torch.empty_like(padded) for _ in lengths]
        self._work = dist.all_gather(self._received, padded, async_op=True)

    def wait(self) -> list[Tensor]:
        self._work.wait()
        return [part[:n] for part, n in zip(self._received, self._lengths, strict=True)]


def take_turn(
    name: str, runner: Runner, team: ProcessTeam, batches: Sequence[tuple[Tensor, Tensor]]
) -> dict[str, float]:
    """Runs some steps. Returns seconds, words of all learners, and bytes by both counts, per step."""
    hosts, size, steps = team.hosts, team.size, len(batches)
    cast(PrefixedTeam, runner.team).ring = name == RING
    runner.drain()
    before = counted(runner)
    begin = time.perf_counter()
    for batch in batches:
        runner.run(batch)
    runner.drain()
    seconds = time.perf_counter() - begin
    own = (counted(runner) - before) / steps
    own[2:] *= hosts.index(hosts[team.rank]) == team.rank  # the kernel counts per host
    found = torch.stack(list(team.gather(own).values()))
    others = [rank for rank in range(size) if hosts.index(hosts[rank]) != rank] or [size - 1]
    return {
        "seconds": seconds / steps,
        "words": size * batches[0][0].numel(),
        "all-reduce": float(found[0, 0]),
        "rows": float(found[others, 1].mean()),
        "sent": float(found[:, 2:].sum()) / size,
        "link": float(found[:, 2].sum()),
    }


def counted(runner: Runner) -> Tensor:
    """Returns bytes so far: all-reduce by formula, values of rows, sent by this host on the link and inside."""
    counts = runner.counts
    rows = sum(counts[kind] for kind in ("sent", "received", "pulled", "pushed", "chief"))
    wire = [float(namespaces.sent_bytes(name) or 0) for name in (namespaces.LINK, namespaces.LOOPBACK)]
    return torch.tensor([counts["all-reduce"], rows, *wire], dtype=torch.float64)


def record(result: MethodResult, turn: dict[str, float], name: str) -> None:
    result.words.append(turn["words"] / turn["seconds"])
    result.sent.append(turn["sent"])
    result.link.append(turn["link"])
    result.counted.append(turn["sent"] if name == "all-reduce" else turn["all-reduce"] + turn["rows"])


def table3(runner: Runner) -> float:
    """Returns bytes of a learner and step by the formulas, adapted to the options."""
    plan, config, total = runner.plan, runner.config, 0.0
    assert plan is not None
    for placement in plan.placements:
        count = transfer(placement.method, placement.alpha, placement.bytes, plan.learners)
        if placement.method == "servers":
            pulled, pushed = (count / 2 if config.gather_on_servers else placement.bytes), count / 2
            half = 0.5 if config.wire == "bfloat16" else 1.0
            count = half * pulled + (1.0 if config.local_aggregation else half) * pushed
        total += count
    return total


if __name__ == "__main__":
    main()
