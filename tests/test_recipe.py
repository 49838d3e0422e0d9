"""A tiny recipe from data to word error rates through run.sh: results, restart after a kill, and error messages."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from random import Random

import pytest

from asr_am.errors import InputError
from asr_am.hmm.states import StateTable
from asr_am.score.scoring import Reference
from tests.support.browser import needs_browser
from tests.support.configurations import config
from tests.support.kaldi_scp import load_scp
from tests.support.page_checks import check_page

ROOT = Path(__file__).resolve().parents[1]
RUN = "recipes/minicts/run.sh"
OWN_DATA = "recipes/kaldi/run.sh"
TINY = [
    "features=fusion260", "corpus.hours=0.08", "corpus.speakers=8", "speed_perturb=[0.9]", "corpus.test_words=120",
    "train.threads=1", "align.mono.iterations=5", "align.tri.iterations=4", "align.tri.realign=[2]",
    "align.tri.increase_until=3", "align.tri.leaves=150", "align.tri.gaussians=600", "speaker.first_beam=6",
    "speaker.search.beam=6", "speaker.search.lattice_beam=3", "ivectors.gaussians=16", "ivectors.dim=8",
    "model.layers=1", "model.cells=32", "model.dropout=0", "train.epochs=3", "train.checkpoint_every=10",
    "schedule.warmup_batches=5", "schedule.base=0.01", "logger=none", "systems=[mono,sat,nnet]", "mmi.train=true",
    "mmi.epochs=1", "mmi.windows=[63/63]", "second.train=true", "second.epochs=1", "second.model.layers=1",
    "decode.search.beam=6", "decode.search.lattice_beam=3", "decode.lm_weights=[8,12]", "log_likelihoods=true",
    "lm.train.epochs=1",
]  # fmt: skip


def recipe(*arguments: str, run: str = RUN, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(ROOT / run), *arguments], cwd=cwd, capture_output=True, text=True, timeout=600)


@contextmanager
def removed(folder: Path) -> Iterator[None]:
    """Takes a folder away for a while."""
    away = folder.rename(folder.with_name("away"))
    try:
        yield
    finally:
        away.rename(folder)


def word_errors(exp: Path) -> dict[str, tuple[int, int]]:
    """Returns (errors, words) of each scored system."""
    found = {}
    for path in sorted(exp.glob("minicts/score/*/wer.json")):
        everything = json.loads(path.read_text())["all"]
        found[path.parent.name] = (everything["errors"], everything["words"])
    return found


@pytest.fixture(scope="module")
def exp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs the tiny recipe. Returns its exp/."""
    folder = tmp_path_factory.mktemp("exp")
    done = recipe(f"exp={folder}", *TINY)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_stage_leaves_its_output(exp: Path) -> None:
    features = [f"features/{name}" for name in ("mfcc", "logmel", "lda", "fmllr", "ivector")]
    for name in ("data", "lang", "lm/kn3", *features, "align/sat", "egs/fmllr+ivector+logmel-sat", "report"):
        assert any((exp / "minicts" / name).iterdir()), name
    assert "| sat |" in (exp / "minicts/RESULTS.md").read_text()
    assert not list(exp.rglob("*.partial")) and not list(exp.rglob("*.tmp"))
    errors = word_errors(exp)
    networks = {f"blstm-local-b64{kind}-s1" for kind in ("", "-mmi", "-conformer", "-combined")}
    lms = ("kn3", "kn3+lstm")  # run.sh has rescore=true
    assert set(errors) == {f"{system}_{lm}" for system in ("mono", "sat", *networks) for lm in lms}
    for name, (wrong, words) in errors.items():
        assert words > 100 and 0 < wrong < words, f"{name} recognised nothing: {wrong} errors in {words} words"


@needs_browser
def test_the_report_in_a_browser(exp: Path, tmp_path: Path) -> None:
    page = exp / "minicts/report/index.html"
    assert "Synthetic speech" in page.read_text() and "Synthetic speech" in (exp / "minicts/RESULTS.md").read_text()
    check_page(page, tmp_path)


def test_the_words_and_the_reference_that_were_scored_are_beside_the_score(exp: Path) -> None:
    rules = exp / "minicts/data/en.glm"
    for result in sorted(exp.glob("minicts/score/*/wer.json")):
        score, counts = result.parent, json.loads(result.read_text())
        dev, test = (
            Reference(score / name / "ref.stm", rules, {}).score(score / name / "hyp.ctm").total
            for name in ("dev", "test")
        )
        assert (test.errors, test.words) == (counts["all"]["errors"], counts["all"]["words"])
        assert 100 * dev.errors / dev.words == counts["dev_wer"]


def test_scores_are_written_for_kaldi(exp: Path) -> None:
    for system in ("mono_kn3", "sat_kn3", "blstm-local-b64-s1_kn3"):
        states = StateTable.load(exp / "minicts/align" / ("mono" if system == "mono_kn3" else "sat") / "states.npz")
        scores = load_scp(exp / "minicts/likelihoods" / system / "test.scp")
        assert len(scores) > 5
        assert all(scores_TL.shape[1] == len(states.labels_L3) for scores_TL in scores.values())


def test_a_recording_is_transcribed_by_a_network_that_needs_speaker_features(exp: Path) -> None:
    stm = exp / "minicts/data/test/ref.stm"
    lines = [line.split() for line in stm.read_text().splitlines() if line.startswith("sw_")]
    spoken = Counter(word for line in lines if line[0] == lines[0][0] for word in line[6:])
    wav = exp / "minicts/data/wav" / f"{lines[0][0]}.wav"
    run = exp / "minicts/decode/blstm-local-b64-s1_kn3"
    command = [sys.executable, "-m", "asr_am.transcribe", "--model", str(run), str(wav)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = [Counter(line.split(": ")[1].split()) for line in done.stdout.splitlines()]
    assert len(found) == 2 and ((found[0] + found[1]) & spoken).total() > 0.25 * spoken.total()


def test_a_copied_exp_is_up_to_date_without_importing_torch_and_leaves_nothing_in_the_working_directory(
    exp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    copy, cwd = tmp_path / "copy", tmp_path / "cwd"
    shutil.copytree(exp, copy, copy_function=shutil.copyfile)  # with new times, as by cp -r
    cwd.mkdir()
    with removed(exp):
        again = recipe(f"exp={copy}", *TINY, cwd=cwd)
    assert again.returncode == 0 and not list(cwd.iterdir())
    assert "wrote" not in again.stdout and again.stdout.count("is up to date") >= 15
    assert "hydra.main" in again.stderr and not re.search(r"\| +(torch|lhotse|wandb|kaldifst)$", again.stderr, re.M)


def test_files_of_the_user_anywhere_in_exp_survive_every_stage(exp: Path, tmp_path: Path) -> None:
    """Each target is made again with another value while one file, somewhere in it or beside it, is the user's."""
    copy, random = tmp_path / "copy", Random(1)
    shutil.copytree(exp, copy)
    cfg = config(f"exp={copy}", *TINY)
    stages = ("data", "lang", "features", "align", "speaker", "egs", "train", "decode", "score", "report")
    targets = [target for name in stages for target in import_module(f"asr_am.stages.{name}").targets(cfg)]
    assert len({target.out for target in targets}) >= 18
    for target in targets:
        folders = [target.out, *(path for path in sorted(target.out.rglob("*")) if path.is_dir())]
        mine = random.choice(folders) / "my notes" / "deep" / f"{random.random()}.txt"
        mine.parent.mkdir(parents=True)
        content = random.randbytes(100)
        mine.write_bytes(content)
        if target.out.name != "report":  # whose key has the command
            assert not target.run(), "still up to date"
        changed = replace(target, config={"changed": True}, build=lambda folder: pytest.fail(f"made {folder}"))
        with pytest.raises(InputError, match="not made by this program"):
            changed.run()
        assert mine.read_bytes() == content
        shutil.rmtree(mine.parents[1])
    folder = copy / "minicts/train/notes"  # beside the runs: a name that a run may get
    folder.mkdir()
    (folder / "todo.txt").write_text("mine")
    with pytest.raises(InputError, match=r"todo\.txt: not made by this program"):
        replace(import_module("asr_am.stages.train").targets(cfg)[0], out=folder).run()
    assert (folder / "todo.txt").read_text() == "mine"


STOPS: list[
    tuple[int, str, Callable[[Path], bool]]
] = [  # stage to start from, target that stays unfinished, condition to kill
    (4, "egs", lambda root: any(root.glob("egs/*.partial/*"))),
    (5, "train", lambda root: any(root.glob("train/*/checkpoints/*"))),
    (6, "decode", lambda root: any(root.glob("decode/*.partial/shards/*/*"))),
]


def kill_when(reached: Callable[[Path], bool], folder: Path, stage: int, *more: str) -> None:
    """Starts the recipe from a stage on, and sends SIGKILL to all of its processes once `reached`."""
    said = folder / "said.txt"
    with said.open("w") as output:
        process = subprocess.Popen(
            [RUN, "--stage", str(stage), f"exp={folder}", *TINY, *more], cwd=ROOT,
            stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    deadline = time.monotonic() + 300
    while not reached(folder / "minicts"):
        assert process.poll() is None and time.monotonic() < deadline, said.read_text()
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_killed_in_the_middle_of_stages_a_copy_ends_with_the_same_errors(exp: Path, tmp_path: Path) -> None:
    """`scripts.soak.recipe_kills` kills all stages, often."""
    folder = tmp_path / "exp"
    shutil.copytree(exp, folder)
    for made in ("egs", "train", "decode", "rescore", "score", "report"):
        shutil.rmtree(folder / "minicts" / made)
    more = ["mmi.train=false", "second.train=false", "systems=[sat,nnet]"]
    with removed(exp):
        for stage, name, reached in STOPS:
            kill_when(reached, folder, stage, *more)
            done = folder / "minicts" / name
            assert not any(done.rglob(".done")), f"{name} was finished before it was killed"
        again = recipe("--stage", "7", f"exp={folder}", *TINY, *more)
    assert again.returncode == 0, again.stdout + again.stderr
    assert len(found := word_errors(folder)) == 4 and found.items() <= word_errors(exp).items()


def test_the_network_is_a_conformer_without_options_of_the_model(exp: Path, tmp_path: Path) -> None:
    (tmp_path / "minicts").mkdir()
    for made in ("data", "lang", "features", "align", "egs"):
        (tmp_path / "minicts" / made).symlink_to(exp / "minicts" / made)
    options = [option for option in TINY if not option.startswith("model.")]
    more = ["train.epochs=1", "mmi.train=false", "second.train=false"]
    done = recipe("--stage", "6", "--stop-stage", "6", f"exp={tmp_path}", *options, *more)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "minicts/train/conformer-local-b21-s1/best.pt").exists()


@pytest.mark.parametrize(("number", "launcher"), [(signal.SIGUSR1, "alone"), (signal.SIGTERM, "process")])
def test_a_training_that_is_asked_to_end_saves_a_checkpoint_first(
    exp: Path, tmp_path: Path, number: int, launcher: str
) -> None:
    """The signal goes to bash alone or to all processes, as Slurm's may. A team continues and is asked again."""
    folder, said = tmp_path / "exp", tmp_path / "said.txt"
    (folder / "minicts").mkdir(parents=True)
    for made in ("data", "lang", "lm", "features", "align", "egs"):
        (folder / "minicts" / made).symlink_to(exp / "minicts" / made)
    more = ["train.epochs=1000", "train.checkpoint_every=100000", f"launcher={launcher}", "mmi.train=false"]
    more += ["learners=2", "strategy=sync"] if launcher == "process" else []
    checkpoints: list[str] = []
    for _ in range(2 if launcher == "process" else 1):
        command = [RUN, "--stage", "6", "--stop-stage", "6", f"exp={folder}", *TINY, *more]
        with said.open("w") as output:
            process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
        deadline = time.monotonic() + 120
        while "training frames" not in said.read_text():
            assert process.poll() is None and time.monotonic() < deadline, said.read_text()
            time.sleep(0.05)
        time.sleep(1)
        (os.kill if launcher == "alone" else os.killpg)(process.pid, number)
        status = process.wait()
        assert status == (75 if number != signal.SIGTERM else -signal.SIGTERM), said.read_text()  # of bash itself
        while "the same command continues" not in said.read_text():
            assert time.monotonic() < deadline, said.read_text()
            time.sleep(0.05)
        checkpoints.append(max(path.name for path in folder.glob("minicts/train/*/checkpoints/checkpoint-?????????")))
    if launcher == "alone":
        return
    assert checkpoints[0] < checkpoints[1] and f"resuming from {folder}" in said.read_text()


def test_a_signal_before_the_first_stage_is_not_lost(tmp_path: Path) -> None:
    """It goes to bash alone, while the options are checked."""
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen([RUN, f"exp={tmp_path}"], cwd=ROOT, text=True, start_new_session=True, **both) as process:
        deadline = time.monotonic() + 60
        while not any(b"asr_am.stages.check" in command for command in commands_of_children(process.pid)):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGUSR1)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 75 and "asked to end by a signal; the same command continues" in said
    assert "stage 0" not in said


def commands_of_children(parent: int) -> list[bytes]:
    found = []
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="ascii").split():
        with suppress(OSError):  # it has ended
            found.append(Path(f"/proc/{child}/cmdline").read_bytes())
    return found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stage", "x"], "non-negative integer"),
        (["--stage=y"], "non-negative integer, not 'y'"),
        (["--stage", "11"], "no stage 11"),
        (["--stage", "3", "--stop-stage", "2"], "comes before"),
        (["--nj", "0"], "at least 1"),
        (["--data-dir", "/nowhere"], "unknown option"),
        (["--frobnicate"], "unknown option"),
        (["word"], "neither"),
        (["exp="], "exp=: is empty"),
        (["~train.epoch"], "train.epoch"),
        (["--stage"], "needs a value"),
    ],
)
def test_misuse_is_one_clear_line(arguments: list[str], message: str) -> None:
    done = recipe(*arguments)
    assert done.returncode == 1 and message in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("corpus", ["an4", "librispeech", "hvb"])
def test_a_corpus_that_is_not_there_is_one_clear_line(corpus: str) -> None:
    done = recipe("--data-dir", "/nowhere", run=f"recipes/{corpus}/run.sh")
    assert done.returncode == 1 and "--data-dir: '/nowhere' does not exist" in done.stderr
    assert done.stderr.count("\n") == 1


def test_help_names_the_stages() -> None:
    done = recipe("--help")
    assert done.returncode == 0 and "--stop-stage" in done.stdout and "7 decode" in done.stdout


def test_a_stage_without_its_inputs_says_which_to_run(tmp_path: Path) -> None:
    done = recipe("--stage", "3", f"exp={tmp_path}")
    assert done.returncode == 1 and "does not exist; run stage 0 (recipes" in done.stderr


def test_a_name_is_text_to_every_stage(tmp_path: Path) -> None:
    done = recipe("--name", "1e3", "--stage", "3", f"exp={tmp_path}", run=OWN_DATA)
    assert done.returncode == 1 and f"ERROR stage align: {tmp_path}/1e3/data does not exist" in done.stderr
    assert not list(tmp_path.iterdir()), "and makes no folder"


@pytest.mark.parametrize(
    "override",
    ["run=.", "run=..", "run=a/b", "run=", "run=x.old", "corpus.name=..", "corpus.name=a/../..", "lm.name=.."],
)
def test_a_name_that_leads_to_another_folder_is_one_clear_line(tmp_path: Path, override: str) -> None:
    (tmp_path / "minicts/train/finished").mkdir(parents=True)
    (tmp_path / "minicts/train/finished/.key").write_text("0")
    command = [sys.executable, "-m", "asr_am.stages.train", override, f"exp={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "becomes the name of a folder" in done.stderr and done.stderr.count("\n") == 1
    assert (tmp_path / "minicts/train/finished/.key").read_text() == "0"


def test_data_of_the_user_in_kaldis_layout_is_not_replaced(tmp_path: Path) -> None:
    data = tmp_path / "mycorpus/data/train"
    data.mkdir(parents=True)
    (data / "text").write_text("a b\n")
    lexicon = tmp_path / "lexicon.txt"
    lexicon.write_text("b B\n")
    given = ["--name", "mycorpus", "--train", str(data), "--test", str(data), "--lexicon", str(lexicon)]
    done = recipe(*given, "--sampling-rate", "8000", f"exp={tmp_path}", "logger=none", run=OWN_DATA)
    assert done.returncode == 1 and "another name for the corpus" in done.stderr and done.stderr.count("\n") == 1
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*")) if path.is_file()] == [
        "lexicon.txt", "mycorpus/data/train/text"
    ]  # fmt: skip


@pytest.mark.parametrize(("override", "message"), [("corpus.name=2024", "2024, not text"), ("seed=2", "is needed")])
def test_no_name_or_a_number_is_one_clear_line(tmp_path: Path, override: str, message: str) -> None:
    command = [sys.executable, "-m", "asr_am.stages.align", "corpus=kaldi", override, f"exp={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and message in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["an4", "minicts", "kaldi"])
def test_own_data_cannot_take_the_name_of_a_recipe(name: str) -> None:
    done = recipe("--name", name, run=OWN_DATA)
    assert done.returncode == 1 and "choose another name" in done.stderr and done.stderr.count("\n") == 1
