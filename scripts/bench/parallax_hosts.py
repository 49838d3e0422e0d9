"""Parallax on two hosts with a slow network: words/s of the LSTM language model, bytes beside Table 3's.

    python scripts/bench/parallax_hosts.py [--learners 4] [--gbits 1] [--rounds 5] [--steps 3] [--sentences 2] ...

`--learners` real learners on each host (namespaces.py; needs root) train asr_am.model.lstm_lm with its sampled softmax,
on batches of `--sentences` sentences of 8 words, drawn here by Zipf's law from 200,000. In each round all ways take
turns of `--steps` steps, in the reverse order every other time, after a round to warm up; a turn ends when the last
update is done everywhere. All limit the norm of the whole gradient, and update by SGD. The ways (Kim et al., 2018):

    all-reduce      all parameters whole, as without Parallax
    all-gather      sparse gradients from each learner to each other, as the library has it: the paper's MPI baseline
    all-gather, ring   the same by gloo's own, from neighbour to neighbour, which puts less on the link
    servers         all parameters on servers, one on each host: BASE of the paper's Table 4
    +HYB            dense parameters by all-reduce; from here on, the plan is Parallax' own
    +LA             gradients are merged on each host before they go to the servers
    +OPAU           norm and clipping on the servers, not at the chief worker
    +OPSW           rows are cast to bfloat16 before they are sent, not after they came
    gather at workers  the last, with all rows pulled and looked up by workers. Nothing else does that, BASE neither, as
                    TensorFlow's embedding_lookup is beside the parameter, too; it shows what moving a gather is worth

All learners share a few cores, which compute far less for each byte than GPUs would, and would hide the network. So
there is little to compute for each byte: short batches with many samples (most of the traffic is their rows, whose
arithmetic grows with the words of a batch), few cells, SGD. Rows are half as wide as the paper's; the narrower they
are, the more of a step is what it does once whatever they are, and the less the way of the rows counts (--cells 256
--projection 128). Network, messages and merging are real. All ways are in memory at once: 17 GB.

Bytes of a learner and step, as Table 3 counts each kind. Of an all-reduce, what a learner sends: of the way all-reduce
the kernel's count on the link and inside of hosts (headers with it), of dense parameters beside sparse ones by formula.
Of rows, the values that it sends and receives, by the library's count; with local aggregation, it sends to the chief of
its host. What chiefs send in the place of others is not in Table 3, so the first learner of each host is left out. α is
the plan's, which is of the first batch. "sent" is all that the kernel has seen a learner send, row numbers and headers
with it; "link" what went between the hosts, both directions together.

Exits with 1 where +OPSW has less than 2.5 x the words/s of the faster all-gather, or no more than servers, or where
bytes are more than 10 % from Table 3's.
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
from asr_am.model.lstm_lm import IGNORED, LstmLm, LstmLmOptions
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
WAYS = {
    "all-reduce": Config(dense=SPARSE, clip_norm=1.0), "all-gather": GATHER, RING: GATHER, "servers": BASE, "+HYB": HYB,
    "+LA": LA, "+OPAU": OPAU, LAST: OPSW, "gather at workers": replace(OPSW, gather_on_servers=False),
}  # fmt: skip


@dataclass
class Way:
    """words: a second, of each turn. The others are bytes per step; sent: by a learner, by the kernel's count; link:
    between the hosts; counted, formula: of a learner, as Table 3 counts.
    """

    words: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    link: list[float] = field(default_factory=list)
    counted: list[float] = field(default_factory=list)
    formula: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learners", type=int, default=4, help="on each host")
    parser.add_argument("--gbits", type=float, default=1.0, help="of the link, in each direction")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="of a turn")
    parser.add_argument("--sentences", type=int, default=2, help="of a learner's batch, 8 words each")
    parser.add_argument("--vocabulary", type=int, default=200_000)
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--cells", type=int, default=320)
    parser.add_argument("--projection", type=int, default=256)
    parser.add_argument("--embedding", type=int, default=16)
    spare = [name for name in WAYS if name not in ("all-gather", RING, "servers", LAST)]
    parser.add_argument("--without", nargs="+", choices=spare, default=[], help="ways to leave out, as memory is short")
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)  # where learner 0 leaves its figures
    options = parser.parse_args()
    if options.results is not None:
        learner(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "ways.json"
        command = [sys.executable, *sys.argv, "--results", str(results)]
        if namespaces.run_on_two_hosts(command, options.learners, options.gbits):
            sys.exit("the learners have failed; their messages are above")
        ways = {name: Way(**way) for name, way in json.loads(results.read_text()).items()}
    sys.exit(not report(ways))


def report(ways: dict[str, Way]) -> bool:
    """Print the table; returns whether all targets are met."""
    print(f"{'':18}{'words/s':>9} {'least':>8} {'most':>8}  x all-gather  x ring   MB/step: Table 3   counted", end="")
    print("              sent      link")
    off = {}
    for name, way in ways.items():
        counted, sent, link = (statistics.median(values) / 1e6 for values in (way.counted, way.sent, way.link))
        off[name] = 1e6 * counted / way.formula - 1
        words = f"{statistics.median(way.words):9.1f} {min(way.words):8.1f} {max(way.words):8.1f}"
        gains = f"{ratio(way, ways['all-gather']):12.2f} {ratio(way, ways[RING]):7.2f}"
        print(f"{name:18}{words}  {gains}  {way.formula / 1e6:17.3f} {counted:9.3f} {off[name]:+7.2%}", end="")
        print(f" {sent:9.3f} {link:9.3f}")
    base = max(("all-gather", RING), key=lambda name: statistics.median(ways[name].words))
    gain, ahead = ratio(ways[LAST], ways[base]), ratio(ways[LAST], ways["servers"])
    worst = max(off, key=lambda name: abs(off[name]))
    print(f"{LAST} has {gain:.2f} x the words/s of {base}, the faster one (target: at least {TARGET})")
    print(f"{LAST} has {ahead:.2f} x the words/s of servers (target: more than 1)")
    print(f"bytes: at most {off[worst]:+.2%} from Table 3's, of {worst} (target: {TOLERANCE:.0%})")
    return gain >= TARGET and ahead > 1 and abs(off[worst]) <= TOLERANCE


def ratio(way: Way, other: Way) -> float:
    """Median over the rounds of words/s to the other's."""
    return statistics.median(a / b for a, b in zip(way.words, other.words, strict=True))


# learners


def learner(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    team = connect(timeout=120)
    torch.manual_seed(team.rank)
    text = iter(zipf_batches(options))
    runners: dict[str, Runner] = {}
    ways = {}
    for name in (name for name in WAYS if name not in options.without):
        runners[name] = runners["all-gather"] if name == RING else build(name, team, options)
        runners[name].run(next(text))
        ways[name] = Way(formula=table3(runners[name]))
    for trial in range(1 + options.rounds):
        for name in sorted(ways, key=list(ways).index, reverse=bool(trial % 2)):
            turn = take_turn(name, runners[name], team, [next(text) for _ in range(options.steps)])
            if trial:  # the first round warms up
                note(ways[name], turn, name)
    for runner in runners.values():
        runner.__exit__(None, None, None)
    if team.rank == 0:
        print(runners[LAST].plan, end="\n\n", flush=True)
        options.results.write_text(json.dumps({name: vars(way) for name, way in ways.items()}))
    team.close()
    end_process()


def zipf_batches(options: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """(input, target) [B, T], without end."""
    frequency_V = 1.0 / torch.arange(1.0, options.vocabulary + 1)
    while True:
        words_BT = torch.multinomial(frequency_V, options.sentences * (WORDS + 1), replacement=True)
        words_BT = words_BT.view(options.sentences, WORDS + 1)
        yield words_BT[:, :-1], words_BT[:, 1:]


def summed_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, float]:
    """The model's own loss, a mean over words, as a sum."""
    words = float((batch[1] != IGNORED).sum())
    return model(*batch) * words, words


def build(name: str, team: ProcessTeam, options: argparse.Namespace) -> Runner:
    """The single-device program, handed to Parallax."""
    config = WAYS[name]
    sizes = {size: getattr(options, size) for size in ("embedding", "cells", "projection", "samples")}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LstmLm(LstmLmOptions(**sizes, sparse=not config.dense), options.vocabulary)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = OwnLetters(team, f"{list(WAYS).index(name)}.")
    return parallax.get_runner(model, summed_loss, optimizer, cast(Team, own), config)


class OwnLetters:
    """A team whose letters have a prefix, so that several runners can share the real one.

    ring: its all-gather is gloo's, which hands parts of equal length (filled up) on from neighbour to neighbour.
    """

    def __init__(self, team: ProcessTeam, prefix: str) -> None:
        self._team, self._prefix, self.ring = team, prefix, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._team, name)

    def start_all_gather(self, x: Tensor, lengths: Sequence[int] | None = None) -> Gather:
        return InRing(x, lengths or [len(x)] * self.size) if self.ring else self._team.start_all_gather(x, lengths)

    def accept(self, tag: str, *lengths: int) -> None:
        self._team.register_tag(self._prefix + tag, *lengths)

    def send(self, to: int, tag: str, clock: int, *tensors: Tensor) -> None:
        self._team.send(to, self._prefix + tag, clock, *tensors)

    def recv(self, tag: str, source: int | None = None, timeout: float | None = None) -> Message | None:
        return self._team.recv(self._prefix + tag, source, timeout)


class InRing:
    """An all-gather under way."""

    def __init__(self, x: Tensor, lengths: Sequence[int]) -> None:
        filled = nn.functional.pad(x, (0, max(lengths) - len(x)))
        self._lengths, self._sent = lengths, filled
        self._received = [torch.empty_like(filled) for _ in lengths]
        self._work = dist.all_gather(self._received, filled, async_op=True)

    def wait(self) -> list[Tensor]:
        self._work.wait()
        return [part[:n] for part, n in zip(self._received, self._lengths, strict=True)]


def take_turn(
    name: str, runner: Runner, team: ProcessTeam, batches: Sequence[tuple[Tensor, Tensor]]
) -> dict[str, float]:
    """Of a step: seconds and words of all learners, bytes of the kernel and of the library's count."""
    hosts, size, steps = team.hosts, team.size, len(batches)
    cast(OwnLetters, runner.team).ring = name == RING
    runner.drain()
    before = counted(runner)
    begin = time.perf_counter()
    for batch in batches:
        runner.run(batch)
    runner.drain()
    seconds = time.perf_counter() - begin
    own = (counted(runner) - before) / steps
    own[2:] *= hosts.index(hosts[team.rank]) == team.rank  # the kernel's counts are a host's
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
    """Bytes so far: all-reduce by formula, rows' values; sent by this host over the link, and inside."""
    counts = runner.counts
    rows = sum(counts[kind] for kind in ("sent", "received", "pulled", "pushed", "chief"))
    wire = [float(namespaces.sent_bytes(name) or 0) for name in (namespaces.LINK, namespaces.LOOPBACK)]
    return torch.tensor([counts["all-reduce"], rows, *wire], dtype=torch.float64)


def note(way: Way, turn: dict[str, float], name: str) -> None:
    way.words.append(turn["words"] / turn["seconds"])
    way.sent.append(turn["sent"])
    way.link.append(turn["link"])
    way.counted.append(turn["sent"] if name == "all-reduce" else turn["all-reduce"] + turn["rows"])


def table3(runner: Runner) -> float:
    """Bytes of a learner and step by the formulas, with what the options change of them."""
    plan, config, total = runner.plan, runner.config, 0.0
    assert plan is not None
    for choice in plan.choices:
        count = transfer(choice.path, choice.alpha, choice.bytes, plan.learners)
        if choice.path == "servers":
            pulled, pushed = (count / 2 if config.gather_on_servers else choice.bytes), count / 2
            half = 0.5 if config.wire == "bfloat16" else 1.0
            count = half * pulled + (1.0 if config.local_aggregation else half) * pushed
        total += count
    return total


if __name__ == "__main__":
    main()
