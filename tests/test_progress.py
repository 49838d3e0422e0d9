"""Progress bars: one line on a terminal that no message shares, and a line of the log every half minute elsewhere."""

from __future__ import annotations

import logging
import os
import pty
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from asr_am import progress
from asr_am.progress import ERASE, LOG_EVERY, ProgressBar, track
from asr_am.train.run_log import TrainingBar

ROOT = Path(__file__).resolve().parents[1]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_time_left_and_rate_do_not_count_what_an_earlier_run_has_done() -> None:
    clock = Clock()
    bar = ProgressBar("decoding", 100, done=40, unit="utterances", clock=clock)
    assert bar.parts() == ["40/100", "0:00:00"]
    clock.now = 10.0
    bar.update(60)
    bar.status = "loss 1.2"
    assert bar.parts() == ["60/100", "0:00:10", "0:00:20 left", "2 utterances/s", "loss 1.2"]
    clock.now = 12.0
    assert bar.parts()[1:3] == ["0:00:12", "0:00:24 left"]


def test_the_line_fits_the_terminal() -> None:
    bar = ProgressBar("training", 4, done=1)
    assert bar.line(200).startswith("  training ━━━━━━······")
    assert all(len(bar.line(columns)) < columns for columns in (1, 20, 40, 80))
    bar.status = "loss 1.234  5,678 frames/s"
    assert bar.line(70).endswith("/4  0:00:00  loss 1.234"), "no part is cut"


@pytest.mark.parametrize(("seconds", "lines"), [(2.9, 0), (10.0, 3)])
def test_without_a_terminal_a_line_every_half_minute(
    seconds: float, lines: int, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    with caplog.at_level(logging.INFO), ProgressBar("work", 10, clock=clock) as bar:
        for _ in range(10):
            clock.now += seconds
            assert list(track([1, 2], "a part")) == [1, 2]
            bar.advance()
    assert len(caplog.messages) == lines == int(10 * seconds // LOG_EVERY)
    assert all(message.startswith("work: ") and "left" in message for message in caplog.messages)
    assert capfd.readouterr().err == ""


PROGRAM = """
    import logging, time
    from pathlib import Path
    from asr_am.parallel import parallel_map
    from asr_am.progress import track
    from asr_am.stages.stage_log import start_logging

    def item(number):
        for _ in track(range(3), "inside a worker"):
            time.sleep(0.1)
        if number == 2:
            logging.getLogger("asr_am.toy").warning("a worker warns")
        time.sleep(0.9 if number < 4 else {last})

    start_logging(Path("{folder}/toy.log"))
    for _ in track(range(1), "outer"):
        logging.getLogger("asr_am.toy").info("a message")
        parallel_map(item, range(5), 2, "inner")
    logging.getLogger("asr_am.toy").info("the end")
"""


def run_on_terminal(folder: Path, last: float, kill_after: str = "") -> str:
    """Returns what the program writes to a terminal of 100 columns. Kills it after it has written `kill_after`."""
    parent, child = pty.openpty()
    source = textwrap.dedent(PROGRAM).format(folder=folder, last=last)
    process = subprocess.Popen(
        [sys.executable, "-c", source], stdout=child, stderr=child, stdin=child, cwd=ROOT, start_new_session=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )  # fmt: skip
    os.close(child)
    written = ""
    try:
        while block := os.read(parent, 4096):
            written += block.decode(errors="replace")
            if kill_after and kill_after in written:
                os.killpg(process.pid, signal.SIGKILL)
    except OSError:  # the end, on Linux
        pass
    process.wait(timeout=20)
    os.close(parent)
    return written


def visible(written: str) -> list[str]:
    """Returns the lines as a terminal shows them in the end."""
    return [line.rstrip("\r").split(ERASE)[-1] for line in written.split("\n")]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run_on_terminal(tmp_path_factory.mktemp("log"), 0.1)


def test_on_a_terminal_no_message_shares_the_line_of_the_bar(written: str) -> None:
    assert visible(written) == ["  a message", "WARNING a worker warns", "  the end", ""]
    drawn = [part for line in written.split("\n") for part in line.split(ERASE) if "·" in part]
    assert all(part.startswith("  outer ") and len(part) < 100 for part in drawn), "the outermost bar only"
    assert any("inner 2/5" in part for part in drawn)
    assert len({part.split("  ")[2] for part in drawn}) >= 3, "it moves every second"


def test_after_a_kill_the_next_run_takes_the_line(tmp_path: Path, written: str) -> None:
    killed = run_on_terminal(tmp_path, 30, kill_after="inner 2/5")
    assert "·" in visible(killed)[-1], "the bar is still there"
    again = visible(killed + written)
    assert [line for line in again if "·" in line] == [] and again[-2] == "  the end"


def test_a_new_leader_shows_the_training_from_where_it_is() -> None:
    bar = TrainingBar(epochs=4)
    bar.epoch(1, 100, 20)
    bar.done(30)
    assert not progress._open, "this learner does not lead"
    bar.start()
    (shown,) = progress._open
    assert shown.parts()[0] == "130/400" and not any("left" in part for part in shown.parts())
    bar.done(40)
    assert shown.parts()[0] == "140/400" and "left" in shown.parts()[2] and shown.description == "training, epoch 2/4"
    bar.stop()
    assert not progress._open
