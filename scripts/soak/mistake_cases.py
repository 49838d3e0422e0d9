"""The mistakes that scripts/soak/mistakes.py makes on a small finished run, in groups."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import soundfile

ROOT = Path(__file__).resolve().parents[1]
WORK = Path("exp/mistakes")  # relative to ROOT, as all paths of the commands
EXP, PRISTINE, OWN, OWN_PRISTINE = WORK / "exp", WORK / "finished", WORK / "own", WORK / "own_finished"
CORPUS = EXP / "minicts"
SMALL = (
    f"exp={EXP}", "+experiment=try", "corpus.hours=0.08", "align.mono.iterations=6", "align.mono.realign=[1,2,3]",
    "align.mono.increase_until=4", "align.tri.iterations=6", "align.tri.realign=[3]", "align.tri.increase_until=4",
    "model.cells=32", "train.epochs=2", "train.checkpoint_every=10", "logger=none", "rescore=true",
    "lm.train.epochs=2", "decode.lm_weights=[8,12]", "decode.search.beam=5", "systems=[nnet]",
)  # fmt: skip
RUN = ("recipes/minicts/run.sh", *SMALL)
OWN_RUN = (
    "recipes/kaldi/run.sh", "--name", "mine", "--train", f"{OWN}/train", "--test", f"{OWN}/test",
    "--lexicon", f"{OWN}/lexicon.txt", f"exp={EXP}", "logger=none", "--stop-stage", "0",
)  # fmt: skip
STAGES = ("data", "lang", "features", "align", "speaker", "egs", "train", "decode", "rescore", "score", "report")
OUTPUTS = {  # of each stage, to be removed so that it has something to do
    0: ["data"], 1: ["lang", "lm/kn3"], 2: ["features/mfcc", "features/logmel"], 3: ["align"], 5: ["egs"], 6: ["train"],
    7: ["graph", "decode"], 8: ["lm/lstm", "rescore"], 9: ["score"], 10: ["report", "RESULTS.md"],
}  # fmt: skip
RUN_NAME = "blstm-sync-v2-b32-s1"


def nothing() -> None:
    pass


@dataclass(frozen=True)
class Mistake:
    """A mistake.

    Attributes:
        group: heading of the table.
        prepare: makes the mistake, if it is not in the command.
        expect: pattern of the line.
        warns: it may write more than one line, as warnings.
        undo: called before the same command runs again, which must succeed.
        signal: sent when the stage has begun.
        cwd: folder to run in.
    """

    group: str
    what: str
    command: Sequence[str]
    prepare: Callable[[], object] = nothing
    expect: str = ""
    status: int = 1
    warns: bool = False
    undo: Callable[[], object] | None = None
    signal: signal.Signals | None = None
    cwd: Path = ROOT
    removes: Sequence[str] = field(default=())  # outputs that are not there before, so that the stage makes them


def remove(path: Path) -> None:
    """Removes a file or a folder."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()


OPTIONS = r"""
+stratgy=sync did you mean strategy
strategy=snyc did you mean sync
strateg=sync did you mean strategy
+strategy.foo=1 strategy\.foo
strategy=local for one learner
learners=3 cannot divide
learners=0 at least 1
launcher=alone learners=2
launcher=mpi there is no such choice
epochs=3 did you mean mmi\.epochs or train\.epochs
train.epoch=3 did you mean train\.epochs
train.epochs=0 at least 1
train.epochs=two integer
train.device=tpu 'cpu'
train.batch_size=33 cannot divide
train.optimizer.kind=lion train\.optimizer\.kind
train.init=/nowhere/best.pt /nowhere/best\.pt
schedule.base=-0.1 above 0
schedule.base=x schedule\.base
model.dropout=1.5 model\.dropout
model.cells=1.5 model\.cells
model.layers=1,2 would overwrite
cluster.hosts=0 cluster\.hosts
cluster.faults.slow={9:2} no learner 9
workload.bytes=-1 workload\.bytes
+logger.group=x logger\.group
features=logml logmel
features.name=fmlr+logmel did you mean fmllr
align.tri.leaves=many align\.tri\.leaves
+align.trii.leaves=2 did you mean tri
egs.dtype=int8 egs\.dtype
+egs.chunks=11 did you mean chunk
speaker.lm=kn9 did you mean kn3
ivectors.dim=0 ivectors\.dim
decode.windows=[9/10] decode\.windows
decode.search.beam=-1 beam
systems=[nnet,st] did you mean sat
lms=[kn4] kn4
lm.train.epochs=0 lm\.train\.epochs
score.bootstrap=0 score\.bootstrap
corpus=minicst did you mean minicts
+corpus.hourz=3 did you mean hours
corpus.hours=x hours
corpus.lang.oov=drop corpus\.lang\.oov
+experiment=fussion did you mean fusion
nj=0 at least 1
run=a/b name of a directory
run=${nothing} nothing
seed=[1 viable
exp=null exp
"""


def options() -> Iterator[Mistake]:
    """Wrong options of each group, on a run that is finished: nothing may be made again."""
    for line in OPTIONS.strip().splitlines():
        override, _, expect = line.partition(" ")
        yield Mistake("Options", override, [*RUN, override], expect=expect)
    for override in ("egs.chunk=11", "corpus.seed=3"):
        what = f"{override}, which stage 7 does not read"
        command = [*RUN, "--stage", "7", "--stop-stage", "9", override]  # the report names the command
        yield Mistake("Options", what, command, expect="has no effect", status=0, warns=True)
    stage = [".venv/bin/python", "-m", "asr_am.stages.decode", *SMALL, "schedule.base=x"]
    yield Mistake("Options", "one stage alone, a wrong option of another", stage, expect="schedule.base")


def command_lines() -> Iterator[Mistake]:
    for words, expect in (
        (["--stage", "x"], "non-negative integer"), (["--stage", "11"], "no stage 11"), (["--stage"], "needs a value"),
        (["--stage", "3", "--stop-stage", "2"], "comes before"), (["--nj", "0"], "at least 1"),
        (["--data-dir", "conf"], "unknown option"), (["--frobnicate"], "unknown option"), (["word"], "neither"),
        (["data_dir=conf"], "corpus minicts takes none"),
    ):  # fmt: skip
        yield Mistake("Command line", shlex.join(words), [*RUN, *words], expect=expect)
    yield Mistake("Command line", "own data without a name", ["recipes/kaldi/run.sh"], expect="--name is missing")
    nowhere = ["recipes/an4/run.sh", "--data-dir", "/nowhere"]
    yield Mistake("Command line", "a corpus that is not there", nowhere, expect="does not exist")
    taken = ["recipes/kaldi/run.sh", "--name", "an4"]
    yield Mistake("Command line", "own data with the name of a recipe", taken, expect="is taken")
    fresh = ["recipes/minicts/run.sh", f"exp={EXP}/fresh"]
    for number in (1, 3, 5, 6, 7, 8, 9):
        what = f"stage {number} first, without those before"
        yield Mistake(
            "Command line", what, [*fresh, "rescore=true", "--stage", str(number)], expect="does not exist; run"
        )
    torchrun = [".venv/bin/torchrun", "--nproc_per_node=2", "-m", "asr_am.stages.train", *SMALL]
    what = "torchrun with two processes for four learners"
    expect = r"traceback : stage train: learners=4: .*\n=+$"
    yield Mistake("Command line", what, [*torchrun, "launcher=torchrun", "learners=4"], expect=expect, warns=True)


def change(name: str, edit: Callable[[bytes], bytes]) -> Callable[[], object]:
    return lambda: (OWN / name).write_bytes(edit((OWN / name).read_bytes()))


def recordings() -> list[Path]:
    return sorted((OWN / "train").glob("*.wav"))


def audio(seconds: float, rate: int, level: float = 0.1) -> Callable[[], object]:
    """Replaces the first recording of the training set."""
    samples = level * np.random.default_rng(0).standard_normal(round(seconds * rate))
    return lambda: soundfile.write(OWN / "train/a0-0.wav", samples, rate)


def own_data() -> Iterator[Mistake]:
    """Kaldi directories as people have them. What can be corrected is, and is counted in the log."""
    first = b"a0-0 YES YES\n"
    for what, prepare, expect in (
        ("text is missing", lambda: (OWN / "train/text").unlink(), "train/text"),
        ("text is empty", change("train/text", lambda text: b""), "is empty"),
        ("wav.scp is missing", lambda: (OWN / "train/wav.scp").unlink(), "train/wav.scp"),
        ("utt2spk is missing", lambda: (OWN / "train/utt2spk").unlink(), "utt2spk"),
        ("an id twice with other words", change("train/text", lambda text: text + b"a0-0 NO\n"), "another value"),
        ("text in Latin-1", change("train/text", lambda text: b"a0-0 CAF\xe9\n" + text), "UTF-8"),
        ("text in UTF-16", change("train/text", lambda text: text.decode().encode("utf-16")), "train/text"),
        ("lexicon in Latin-1", change("lexicon.txt", lambda text: b"CAF\xc9 K AE F\n" + text), "UTF-8"),
        ("a word without phones", change("lexicon.txt", lambda text: text + b"WORD\n"), "no phones"),
        ("an empty lexicon", change("lexicon.txt", lambda text: b""), "lexicon"),
        ("a lexicon of another language", change("lexicon.txt", lambda text: b"JA Y AA\n"), "not in the lexicon"),
        ("all audio missing", lambda: [path.unlink() for path in recordings()], "no usable audio"),
        ("all audio empty files", lambda: [path.write_bytes(b"") for path in recordings()], "audio"),
        ("one utterance in train and test",
         lambda: shutil.copytree(OWN / "train", OWN / "test", dirs_exist_ok=True), "is in"),
        ("a command in wav.scp",
         change("train/wav.scp", lambda text: text + b"a0-9 sox x.mp3 -t wav - |\n"), "allow-pipes"),
        ("a segment with a word as its time", change("train/segments", lambda _: b"a0-0 a0-0 zero 1\n"), "segments:1"),
    ):  # fmt: skip
        yield Mistake("Own data, refused", what, OWN_RUN, prepare, expect)
    for what, prepare in (
        ("CRLF in all files", lambda: [change(f"{part}/{name}", lambda text: text.replace(b"\n", b"\r\n"))()
                                       for part in ("train", "test") for name in ("text", "wav.scp", "utt2spk")]),
        ("a byte order mark", change("train/text", lambda text: b"\xef\xbb\xbf" + text)),
        ("CRLF and a byte order mark in the lexicon",
         change("lexicon.txt", lambda text: b"\xef\xbb\xbf" + text.replace(b"\n", b"\r\n"))),
        ("a line twice", change("train/text", lambda text: text + first)),
        ("words in lower case, with commas",
         change("train/text", lambda text: text.replace(first, b"a0-0 Yes, yes.\n"))),
        ("one empty wav", lambda: (OWN / "train/a0-0.wav").write_bytes(b"")),
        ("one wav cut in its header", change("train/a0-0.wav", lambda content: content[:20])),
        ("one wav cut in its samples", change("train/a0-0.wav", lambda content: content[: len(content) // 2])),
        ("one wav of zeros", audio(1.0, 16000, 0.0)),
        ("one wav of 20 ms", audio(0.02, 16000)),
        ("one wav at 8 kHz", audio(1.0, 8000)),
        ("one wav missing", lambda: (OWN / "train/a0-0.wav").unlink()),
        ("a transcript without words", change("train/text", lambda text: text.replace(first, b"a0-0\n"))),
        ("an utterance without a speaker", change("train/utt2spk", lambda text: text.partition(b"\n")[2])),
    ):  # fmt: skip
        yield Mistake("Own data, corrected and counted", what, OWN_RUN, prepare, status=0, warns=True)


def paths() -> Iterator[Mistake]:
    """Paths that are no mistakes: they must work, and leave nothing elsewhere."""
    for name in ("with blank", "ünïcode", "a'quote"):
        quoted = f"exp='{EXP}/{name}'" if "'" not in name else f'exp="{EXP}/{name}"'
        command = ["recipes/minicts/run.sh", quoted, "corpus.hours=0.05", "corpus.speakers=4", "corpus.test_words=100",
                   "--stop-stage", "2"]  # fmt: skip
        yield Mistake("Paths", f"exp={name}", command, status=0)
    yield Mistake("Paths", "exp=~/x, which this shell does not expand", [*RUN, "exp=~/x"], expect=r"\$HOME")
    linked = [word.replace(f"exp={EXP}", f"exp={WORK}/link") for word in RUN]

    def link() -> None:
        Path(WORK / "link").unlink(missing_ok=True)
        Path(WORK / "link").symlink_to("exp")

    yield Mistake("Paths", "exp is a link", [*linked, "--stop-stage", "2"], link, status=0)
    blank = [word.replace(str(OWN), str(WORK / "own data")) for word in OWN_RUN]

    def copy() -> None:
        shutil.rmtree(WORK / "own data", ignore_errors=True)
        shutil.copytree(OWN, WORK / "own data")
        for part in ("train", "test"):
            scp = WORK / "own data" / part / "wav.scp"
            scp.write_text(scp.read_text().replace(str(OWN), str(WORK / "own data")))

    yield Mistake("Paths", "own data in a folder with a blank", blank, copy, status=0)
    elsewhere = [str(ROOT / RUN[0]), *RUN[1:], "--stop-stage", "0"]
    yield Mistake("Paths", "run from another folder", elsewhere, status=0, cwd=ROOT / "scripts")


def damage(name: str, edit: Callable[[bytes], bytes]) -> Callable[[], object]:
    """Changes a file of the finished run. Its time stays the same."""

    def change_it() -> None:
        path = next(iter(sorted(CORPUS.glob(name))))
        stat = path.stat()
        path.write_bytes(edit(path.read_bytes()))
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    return change_it


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def garble(content: bytes) -> bytes:
    return content[:8] + bytes(255 - byte for byte in content[8:])


def damaged_files() -> Iterator[Mistake]:
    """A finished output that lost a file, or has another content. Stages name the file and what to run."""
    remake = ["graph", "decode"]
    for what, name, stage in (
        ("the manifests", "data/train/supervisions.jsonl.gz", 2), ("the lexicon", "lang/lexicon.txt", 3),
        ("features", "features/mfcc/train.1.ark", 3), ("alignments", "align/tri/ali/train.ark", 5),
        ("the examples", "egs/*/train/*.npy", 6), ("the network", f"train/{RUN_NAME}/best.pt", 7),
        ("the LM", "lm/kn3/lm.arpa", 7), ("lattices", f"decode/{RUN_NAME}_kn3/lattices/test.ark", 8),
        ("CTM files", f"decode/{RUN_NAME}_kn3/ctm/test_8_0.ctm", 9),
    ):  # fmt: skip
        command = [*RUN, "--stage", str(stage)]
        yield Mistake("Damaged files", f"{what}: cut", command, damage(name, cut), "another size|again")
        lost = Mistake("Damaged files", f"{what}: removed", command, lambda name=name: next(CORPUS.glob(name)).unlink(),
                       "is missing|does not exist")  # fmt: skip
        yield lost
    for what, name, number, removes in (
        ("features of the same size", "features/mfcc/train.1.ark", 3, ["align"]),
        ("alignments of the same size", "align/tri/ali/train.ark", 5, ["egs"]),
        ("the network of the same size", f"train/{RUN_NAME}/best.pt", 7, remake),
        ("the graph of the same size", "graph/tri_kn3/HCLG.fst", 7, ["decode"]),
        ("lattices of the same size", f"decode/{RUN_NAME}_kn3/lattices/dev.ark", 8, ["rescore"]),
        ("the LSTM of the same size", "lm/lstm/best.pt", 8, ["rescore"]),
        ("the reference of the same size", "data/test/ref.stm", 9, ["score"]),
        ("an audio file of the same size", "data/wav/*.wav", 2, ["features/mfcc", "features/logmel"]),
        ("the n-gram LM of the same size", "lm/kn3/lm.arpa", 8, ["rescore"]),
        ("the states of the same size", "align/tri/states.npz", 7, remake),
        ("the lexicon of the same size", "lang/lexicon.txt", 3, ["align"]),
        ("L.fst of the same size", "lang/L.fst", 3, ["align"]),
        ("scores as JSON", f"score/{RUN_NAME}_kn3/wer.json", 10, ["report", "RESULTS.md"]),
    ):  # fmt: skip
        command = [*RUN, "--stage", str(number), "--stop-stage", str(number)]
        yield Mistake("Damaged files", what, command, damage(name, garble), "", removes=removes)
    unfinished = damage(f"train/{RUN_NAME}/.done", lambda content: b"")
    command = [*RUN, "--stage", "6", "--stop-stage", "6"]
    yield Mistake(
        "Damaged files", "an empty .done: the run continues from its checkpoint", command, unfinished, status=0
    )


def mount(*options: str) -> None:
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(EXP)], check=True, capture_output=True
    )


def used() -> int:
    stat = os.statvfs(EXP)
    return (stat.f_blocks - stat.f_bfree) * stat.f_frsize


def disks() -> Iterator[Mistake]:
    """A disk without space or without permission to write, for each stage: the same command goes on afterwards."""

    def onto_disk(removes: Sequence[str]) -> None:
        mount("size=2g")
        shutil.copytree(PRISTINE, EXP, symlinks=True, dirs_exist_ok=True)
        for name in removes:
            remove(CORPUS / name)

    def full(removes: Sequence[str]) -> None:
        onto_disk(removes)
        mount("remount", f"size={used() + (12 << 10)}")

    def read_only(removes: Sequence[str]) -> None:
        onto_disk(removes)
        mount("remount", "ro")

    def larger() -> None:
        mount("remount", "rw", "size=2g")

    for number, removes in OUTPUTS.items():
        command = [*RUN, "--stage", str(number), "--stop-stage", str(number)]
        yield Mistake("Full disk", f"stage {number}, {STAGES[number]}", command, lambda removes=removes: full(removes),
                      r"the disk is full|free; free some space", undo=larger)  # fmt: skip
    for number, removes in OUTPUTS.items():
        command = [*RUN, "--stage", str(number), "--stop-stage", str(number)]
        yield Mistake("Read-only disk", f"stage {number}, {STAGES[number]}", command,
                      lambda removes=removes: read_only(removes), "Read-only", undo=larger)  # fmt: skip
    command = [*RUN, "--stage", "2", "--stop-stage", "9"]
    yield Mistake("Read-only disk", "everything is up to date", command, lambda: read_only(()), status=0, undo=larger)


def signals() -> Iterator[Mistake]:
    """Ctrl-C and SIGTERM in each stage: the same command goes on."""
    for number, removes in OUTPUTS.items():
        command = [*RUN, "--stage", str(number), "--stop-stage", str(number)]
        for kind, word in ((signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")):
            name = "Ctrl-C" if kind == signal.SIGINT else "SIGTERM"
            what = f"stage {number}, {STAGES[number]}"
            yield Mistake(name, what, command, expect=word, status=128 + kind, signal=kind, removes=removes)


def two_runs() -> Iterator[Mistake]:
    """Two runs of one output at once."""
    started: list[subprocess.Popen[bytes]] = []
    for number, begun in ((3, "align.partial"), (6, f"train/{RUN_NAME}")):
        command = [*RUN, "--stage", str(number), "--stop-stage", str(number), "train.epochs=20"]  # a long training

        def start(command: Sequence[str] = command, begun: str = begun) -> None:
            started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            while started[-1].poll() is None and not (CORPUS / begun).exists():
                time.sleep(0.01)

        def wait() -> None:
            assert started.pop().wait(timeout=900) == 0

        what, expect = f"stage {number}, {STAGES[number]}", "another process is making it"
        yield Mistake("Two at once", what, command, start, expect, undo=wait, removes=OUTPUTS[number])


GROUPS = (options, command_lines, own_data, paths, damaged_files, two_runs, disks, signals)
