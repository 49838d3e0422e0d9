"""Targets: made once, redone when a source changes, safe against being killed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from asr_am import disk
from asr_am.data.ownership import SIGNED, mark_own_dir
from asr_am.errors import InputError
from asr_am.stages import align, speaker
from asr_am.stages.target import Target
from tests.support.configurations import config


def copy_of(source: Path) -> Callable[[Path], None]:
    return lambda folder: (folder / "copy.txt").write_text(source.read_text(encoding="utf-8") + "!") and None


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.txt"
    path.write_text("words")
    return path


def target(tmp_path: Path, source: Path, **changes: object) -> Target:
    given = {"out": tmp_path / "out", "inputs": [source], "config": {"a": 1}, "build": copy_of(source)}
    return Target(**(given | changes))  # type: ignore[arg-type]


def test_made_once_then_up_to_date(tmp_path: Path, source: Path) -> None:
    assert target(tmp_path, source).run()
    assert (tmp_path / "out/copy.txt").read_text() == "words!"
    assert not target(tmp_path, source).run()
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith(".")) == ["out", "source.txt"]


@pytest.mark.parametrize("in_place", [False, True])
def test_redone_when_a_source_a_value_or_an_output_changes(tmp_path: Path, source: Path, in_place: bool) -> None:
    assert target(tmp_path, source, in_place=in_place).run()
    source.write_text("other words", encoding="utf-8")
    assert target(tmp_path, source, in_place=in_place).run()
    assert (tmp_path / "out/copy.txt").read_text() == "other words!"
    assert target(tmp_path, source, in_place=in_place, config={"a": 2}).run()
    assert target(tmp_path, source, in_place=in_place, config={"a": 2}, version=2).run()
    (tmp_path / "out/copy.txt").write_text("")
    assert target(tmp_path, source, in_place=in_place, config={"a": 2}, version=2).run()
    assert (tmp_path / "out.old").exists() == in_place


def test_an_unfinished_or_failed_run_replaces_no_finished_one(tmp_path: Path, source: Path) -> None:
    def interrupted(folder: Path) -> None:
        (folder / "checkpoint").write_text("half")
        raise KeyboardInterrupt

    def fail(folder: Path) -> None:
        (folder / "config.yaml").write_text("a: -1")
        raise InputError("a=-1: must be positive")

    def run(value: int, build: Callable[[Path], None] | None = None) -> None:
        build = build or copy_of(source)
        target(tmp_path, source, config={"a": value}, build=build, in_place=True, settings=["config.yaml"]).run()

    def folders() -> dict[str, str]:
        return {
            path.parent.name: path.read_text() for path in sorted(tmp_path.glob("*/c*")) if path.name != "config.yaml"
        }

    run(1)
    source.write_text("second", encoding="utf-8")
    run(2)
    finished = {"out": "second!", "out.old": "words!"}
    assert folders() == finished
    for value in (-1, -2):  # two typos
        with pytest.raises(InputError, match="must be positive"):
            run(value, fail)
        assert folders() == finished and not (tmp_path / "out.new").exists()
    with pytest.raises(KeyboardInterrupt):
        run(3, interrupted)
    assert folders() == {**finished, "out.new": "half"}
    with pytest.raises(InputError):
        run(-3, fail)
    assert folders() == {**finished, "out.new": "half"}
    run(2)
    assert folders() == {**finished, "out.new": "half"}, "and it is up to date"
    source.write_text("fourth", encoding="utf-8")
    run(4)
    assert folders() == {"out": "fourth!", "out.old": "second!", "out.new": "half"}, "what is unfinished stays"


def test_an_unfinished_run_never_replaces_a_finished_one(tmp_path: Path, source: Path) -> None:
    def run(value: int, build: Callable[[Path], None] | None = None) -> None:
        build = build or copy_of(source)
        target(tmp_path, source, config={"a": value}, build=build, in_place=True).run()

    for value in (1, 2):
        run(value)
    (tmp_path / "out/.done").unlink()  # as if the second had been cut short
    run(3)
    assert (tmp_path / "out.old/.done").exists() and (tmp_path / "out.unfinished").exists()


def test_a_value_may_change_while_an_output_is_unfinished(
    tmp_path: Path, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupted(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise KeyboardInterrupt

    def run(out: str = "out", build: Callable[[Path], None] | None = None, **values: int) -> str:
        caplog.clear()
        config = {"rate": 1, "learners": 4, **values}
        made = target(
            tmp_path,
            source,
            out=tmp_path / out,
            config=config,
            build=build or copy_of(source),
            in_place=True,
            may_change=("learners",),
        )
        with caplog.at_level("INFO"), suppress(KeyboardInterrupt):
            made.run()
        return caplog.text

    run(build=interrupted)
    said = run(out="two", build=interrupted, learners=2)
    assert f"{tmp_path}/out is unfinished, and differs in learners only: run=out continues it" in said
    assert "resuming" in run(learners=2) and (tmp_path / "out/half").exists()
    assert json.loads((tmp_path / "out/.done").read_text())["config"] == {"rate": 1, "learners": 2}
    assert "up to date" in run(learners=2)
    assert "out was made from other values: learners (4, now 6): kept until" in run(learners=6), "it was finished"
    assert not (tmp_path / "out/half").exists() and (tmp_path / "out.old/half").exists()
    run(out="rate", build=interrupted)
    said = run(out="rate", rate=2)
    assert "rate was made from other values: rate (1, now 2): kept until" in said and "resuming" not in said


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("folder", ["out", "out.partial", "out.new", "out.outdated", "out.old"])
def test_a_folder_of_the_user_is_never_touched(tmp_path: Path, source: Path, folder: str, in_place: bool) -> None:
    made = target(tmp_path, source, in_place=in_place)
    if folder != "out":
        assert made.run()
        source.write_text("changed", encoding="utf-8")
    mine = tmp_path / folder / "deep/notes.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    used = {"out", "out.new", "out.old"} if in_place else {"out", "out.partial", "out.outdated"}
    if folder in used:
        with pytest.raises(InputError, match=r"notes\.txt: not made by this program"):
            made.run()
    else:
        assert made.run()
    assert mine.read_text() == "mine"


def test_an_output_that_cannot_be_removed_is_named(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = target(tmp_path, source)
    assert made.run()
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # as with files in folders of another user
    source.write_text("changed", encoding="utf-8")
    assert made.run()
    assert "out.outdated, the output before, cannot be removed" in caplog.text
    source.write_text("again", encoding="utf-8")
    with pytest.raises(InputError, match=r"out\.outdated: cannot be removed: files in it may belong to another user"):
        made.run()


@pytest.mark.parametrize("in_place", [False, True])
def test_a_file_of_the_user_in_an_output_is_never_removed(tmp_path: Path, source: Path, in_place: bool) -> None:
    made = target(tmp_path, source, in_place=in_place)
    assert made.run()
    mine = tmp_path / "out/plots/mine.png"
    mine.parent.mkdir()
    mine.write_text("mine")
    source.write_text("changed", encoding="utf-8")
    with pytest.raises(InputError, match=r"mine\.png: not made by this program"):
        made.run()
    assert mine.read_text() == "mine" and (tmp_path / "out/copy.txt").read_text() == "words!"
    shutil.move(mine, tmp_path)
    assert made.run()


def test_notes_written_beside_a_training_run_are_not_its_output(tmp_path: Path, source: Path) -> None:
    def build(folder: Path) -> None:
        copy_of(source)(folder)
        (folder / "notes.txt").write_text("looks good")  # as the user does meanwhile

    made = target(tmp_path, source, build=build, in_place=True, makes=["copy.txt"])
    assert made.run()
    assert "notes.txt" not in json.loads((tmp_path / "out/.done").read_text())["files"]
    (tmp_path / "out/notes.txt").write_text("looks even better")
    assert not made.run()
    source.write_text("changed", encoding="utf-8")
    with pytest.raises(InputError, match=r"notes\.txt: not made by this program"):
        made.run()


def test_an_output_does_not_replace_what_it_is_made_from(tmp_path: Path, source: Path) -> None:
    inside = tmp_path / "out/wav"
    inside.mkdir(parents=True)
    with pytest.raises(InputError, match="lies in"):
        target(tmp_path, source, inputs=[inside]).run()
    assert inside.is_dir()


def test_an_extra_output_replaces_no_file_of_the_user(tmp_path: Path, source: Path) -> None:
    mine = tmp_path / "RESULTS.md"
    mine.write_text("mine")
    with pytest.raises(InputError, match="not made by this program"):
        target(tmp_path, source, extra_outputs=[mine]).run()
    assert mine.read_text() == "mine"


def test_one_function_removes() -> None:
    """Everything that is removed is removed by `disk.remove`, as asr_am/data/ownership.py says."""
    root = Path(__file__).parents[2]
    removal = re.compile(r"\b(rmtree|unlink|removedirs|rmdir)\(|\bos\.remove\(")
    files = [path for folder in ("asr_am", "local") for path in (root / folder).rglob("*.py")]
    found = [str(path.relative_to(root)) for path in files if removal.search(path.read_text(encoding="utf-8"))]
    assert found == ["asr_am/disk.py"]


def test_of_a_symbolic_link_only_the_link_is_removed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to("mine")
    disk.remove(tmp_path / "link")
    assert (tmp_path / "mine").is_dir() and not (tmp_path / "link").is_symlink()


def test_what_other_programs_write_beside_the_output_is_no_part_of_it(tmp_path: Path, source: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "wandb").mkdir()
        (folder / "wandb/debug.log").write_text("one line\n")

    made = target(tmp_path, source, build=build, in_place=True, exclude=("wandb",))
    assert made.run()
    (tmp_path / "out/wandb/debug.log").write_text("one line\nand another\n")
    assert not made.run()


def test_redone_downstream_of_what_was_redone(tmp_path: Path, source: Path) -> None:
    def chain(value: int) -> list[bool]:
        first = target(tmp_path, source, config={"a": value})
        build = copy_of(tmp_path / "out/copy.txt")
        return [first.run(), Target(tmp_path / "second", [first.out], {}, build).run()]

    assert chain(1) == [True, True]
    assert chain(1) == [False, False]
    assert chain(2) == [True, True]


def test_missing_and_unfinished_inputs_are_named(tmp_path: Path, source: Path) -> None:
    with pytest.raises(InputError, match="gone does not exist"):
        target(tmp_path, source, inputs=[tmp_path / "gone"]).run()
    with pytest.raises(ZeroDivisionError):
        target(tmp_path, source, in_place=True, build=lambda folder: folder.joinpath("half", str(1 / 0)) and None).run()
    with pytest.raises(InputError, match="out is unfinished"):
        Target(tmp_path / "second", [tmp_path / "out"], {}, copy_of(source)).run()


def test_a_folder_that_an_export_has_marked_is_an_input(tmp_path: Path, source: Path) -> None:
    mark_own_dir(tmp_path / "exported", "asr_am.kaldi_export")
    (tmp_path / "exported/file").write_text("x")
    assert Target(tmp_path / "second", [tmp_path / "exported"], {}, copy_of(source)).run()


@pytest.mark.parametrize("damage", [lambda path: path.write_text("w"), Path.unlink], ids=["cut", "gone"])
def test_a_damaged_input_is_named(tmp_path: Path, source: Path, damage: Callable[[Path], object]) -> None:
    first = target(tmp_path, source)
    first.run()
    second = Target(tmp_path / "second", [first.out], {}, lambda folder: None)
    second.run()
    damage(tmp_path / "out/copy.txt")
    with pytest.raises(InputError, match=r"out/copy.txt is missing, or has another size"):
        second.run()
    assert first.run() and not second.run()


def test_files_beside_the_output_are_part_of_it(tmp_path: Path, source: Path) -> None:
    table = tmp_path / "table.md"
    text = f"{SIGNED}\n1 2 3"
    made = target(tmp_path, source, build=lambda folder: table.write_text(text) and None, extra_outputs=[table])
    assert made.run() and not made.run()
    table.write_text(f"{SIGNED}\n1")
    assert made.run() and table.read_text() == text
    table.unlink()
    assert made.run() and not made.run()


def test_failure_keeps_the_old_output(tmp_path: Path, source: Path) -> None:
    target(tmp_path, source).run()

    def fail(folder: Path) -> None:
        (folder / "copy.txt").write_text("half")
        raise InputError("no")

    with pytest.raises(InputError):
        target(tmp_path, source, config={"a": 2}, build=fail).run()
    assert (tmp_path / "out/copy.txt").read_text() == "words!"
    assert not target(tmp_path, source).run()


SCRIPT = """
    import sys, time
    from pathlib import Path
    from asr_am.data.temporary import replacing
    from asr_am.stages.target import Target

    def build(folder):
        for step in range(3):
            if not (folder / str(step)).exists():
                (folder / str(step)).write_text(sys.argv[2])
                print("made", step, flush=True)
            if step == int(sys.argv[3]):
                with replacing(folder / "late.txt") as temporary:
                    temporary.write_text("half")
                    print("waits", flush=True)
                    time.sleep(60)

    Target(Path(sys.argv[1]) / "out", [], {}, build).run()
"""


def test_killed_in_the_middle_then_resumed(tmp_path: Path) -> None:
    def start(mark: str, stop_at: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path), mark, str(stop_at)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    first = start("first", 1)
    assert first.stdout
    assert [first.stdout.readline() for _ in range(3)] == ["made 0\n", "made 1\n", "waits\n"]
    with pytest.raises(InputError, match="another process"):
        Target(tmp_path / "out", [], {}, lambda folder: None).run()
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert not (tmp_path / "out").exists()
    second = start("second", 9)
    assert second.communicate(timeout=30)[0] == "made 2\n"
    assert [(tmp_path / "out" / str(step)).read_text() for step in range(3)] == ["first", "first", "second"]
    assert not list((tmp_path / "out").glob("*late*")), "what was half-written"


def test_killed_between_the_two_renames(tmp_path: Path, source: Path) -> None:
    target(tmp_path, source).run()
    (tmp_path / "out").rename(tmp_path / "out.partial")
    called = []
    target(tmp_path, source, build=called.append).run()
    assert (tmp_path / "out/copy.txt").read_text() == "words!" and not called


POOL = """
    import os, sys, time
    from pathlib import Path
    from asr_am.parallel import parallel_map
    from asr_am.stages.target import Target

    def item(number):
        os.write(1, b"began\\n")  # at once, so that two workers never share a line
        time.sleep(60)

    Target(Path(sys.argv[1]) / "out", [], {}, lambda folder: parallel_map(item, [1, 2, 3], 2, "waiting")).run()
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_killed_alone_its_workers_end_and_release_the_target(tmp_path: Path, how: signal.Signals) -> None:
    command = [sys.executable, "-c", textwrap.dedent(POOL), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        assert [parent.stdout.readline() for _ in range(2)] == ["began\n", "began\n"]
        parent.send_signal(how)
        assert parent.stdout.read() == "", "all processes have closed stdout"
    assert Target(tmp_path / "out", [], {}, lambda folder: None).run()


def chain(root: Path, source: Path) -> list[Target]:
    """Returns targets in root/exp: made from a file outside, from the first target, and from a file in the first."""
    first = Target(root / "exp/first", [source], {"a": 1}, copy_of(source))
    copy = first.out / "copy.txt"
    return [
        first,
        Target(root / "exp/second", [first.out], {}, copy_of(copy), in_place=True),
        Target(root / "exp/third", [copy], {}, copy_of(copy)),
    ]


def test_a_copy_of_everything_is_up_to_date(tmp_path: Path, source: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    assert all(target.run() for target in chain(old, source))
    for path in old.rglob("*"):
        os.utime(path, (1, 1))  # cp -r changes the times
    shutil.copytree(old, new, copy_function=shutil.copyfile)
    shutil.rmtree(old)
    assert not any(target.run() for target in chain(new, source))
    source.write_text("other words", encoding="utf-8")
    assert all(target.run() for target in chain(new, source))


def test_devices_of_gmms_and_fmllr_cause_no_rerun() -> None:
    def configs(*overrides: str) -> dict[Path, object]:
        cfg = config("corpus=minicts", "align=sat", *overrides)
        made = [*align.targets(cfg), *speaker.targets(cfg)]
        assert not overrides or str(made).count("'device': 'cuda'") == 3, "they are used all the same"
        return {target.out: target.config for target in made}

    default = configs()
    assert default == configs("align.lda_mllt.device=cuda", "speaker.fmllr.device=cuda")
    assert str(default).count("'device': 'cpu'") == 3, "keys of finished outputs stay"
