"""The lines of all learners below the progress bar, as a terminal shows them, and what learners report."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from asr_am.train.learner_view import LearnerReport, LearnerView

ROOT = Path(__file__).resolve().parents[2]
REPORT = LearnerReport("launch", 1200, 1.54, 12.34, 0)

PROGRAM = """
    import logging, time
    from pathlib import Path
    from asr_am.stages.stage_log import start_logging
    from asr_am.train.learner_view import LearnerReport, LearnerView
    from asr_am.train.run_log import TrainingBar

    folder = Path("{folder}")
    start_logging(folder / "toy.log")
    view, bar = LearnerView(folder, 3), TrainingBar(2)
    bar.below = view.lines
    bar.epoch(0, 100, 10)
    bar.start()
    for step in range(4):
        LearnerView(folder, 3).report(1, LearnerReport("a", step, 1.0, 0.5, step), [0, 1])  # another process
        view.report(0, LearnerReport("a", 10 + step, 0.0, 0.0, 0), [0, 1] if step > 1 else [0, 1, 2])
        time.sleep(0.6)
        if step == 1:
            logging.getLogger("asr_am.toy").info("a message")
            logging.getLogger("asr_am.toy").info("another one")
    bar.stop()
    logging.getLogger("asr_am.toy").info("the end")
"""


def run_on_terminal(folder: Path, **environment: str) -> str:
    """Returns what the program writes to a terminal."""
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM).format(folder=folder)], stdout=child, stderr=child, stdin=child,
        cwd=ROOT, env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "10", **environment},
    )  # fmt: skip
    os.close(child)
    written = b""
    try:
        while block := os.read(parent, 4096):
            written += block
    except OSError:  # the end, on Linux
        pass
    os.close(parent)
    assert process.wait(timeout=20) == 0
    return written.decode()


def screens(written: str) -> list[list[str]]:
    """Returns what the terminal shows before each erasure and in the end."""
    lines, row, column, shown = [""], 0, 0, []
    for part in re.findall(r"\x1b\[\d*[A-Z]|[\r\n]|[^\x1b\r\n]+", written):
        if part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\x1b[J":
            shown.append([line for line in lines if line])
            lines[row:] = [lines[row][:column]]
        elif part[0] == "\x1b":
            assert part[-1] == "A" and row >= int(part[2:-1]), part
            row -= int(part[2:-1])
        else:
            lines[row] = lines[row][:column] + part + lines[row][column + len(part) :]
            column += len(part)
    return [*shown, [line for line in lines if line]]


def test_each_learner_has_a_line_below_the_bar_and_no_message_is_lost(tmp_path: Path) -> None:
    shown = screens(run_on_terminal(tmp_path))
    assert shown[-1] == ["  a message", "  another one", "  the end"]
    with_view = [screen for screen in shown if any("learner" in line for line in screen)]
    assert all("training, epoch 1/2" in screen[-4] and screen[-1].startswith("  learner 2") for screen in with_view)
    first, last = with_view[0][-3:], with_view[-1]
    assert re.fullmatch(r"  learner 0        1\d batches  staleness 0.0  waited 0.0 s  alive", first[0])
    assert first[2] == "  learner 2   no batch yet  alive"
    assert last[:2] == ["  a message", "  another one"] and len(last) == 6
    assert "restarted 3 x" in last[4] and last[5].endswith("dead")


def test_plain_output_has_no_control_sequences(tmp_path: Path) -> None:
    written = run_on_terminal(tmp_path, ASR_AM_PLAIN="1")
    assert written.replace("\r\x1b[J", "").split() == ["a", "message", "another", "one", "the", "end"]
    assert "learner" not in run_on_terminal(tmp_path, TERM="dumb")


def test_reports_of_an_earlier_launch_and_damaged_ones_are_not_shown(tmp_path: Path) -> None:
    view = LearnerView(tmp_path, 4)
    assert view.lines() == [] and LearnerView(None, 1).lines() == []
    LearnerView(tmp_path, 4).report(1, LearnerReport("earlier", 5, 0.0, 0.0, 0), [1])
    (tmp_path / ".learner-2.json").write_text('{"launch": "lau')
    view.report(0, REPORT, [0, 1, 2])
    lines = view.lines()
    assert "1,200 batches  staleness 1.5  waited 12.3 s  alive" in lines[0]
    assert all("no batch yet" in line for line in lines[1:])
    assert [line.split()[-1] for line in lines] == ["alive", "alive", "alive", "dead"]
    assert view.due(3) and not view.due(3), "once a second"


@pytest.mark.parametrize("learners", [1, 3])
def test_a_single_learner_is_not_shown(learners: int) -> None:
    view = LearnerView(None, learners)
    assert view.due(0) == (learners > 1)
    view.report(0, REPORT, [0])
    assert len(view.lines()) == (learners if learners > 1 else 0)
