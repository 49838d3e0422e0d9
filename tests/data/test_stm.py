from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from lhotse import SupervisionSegment

from asr_am.data.stm import check_stm, write_reco2file_and_channel, write_stm
from asr_am.errors import InputError


def segment(recording: str, channel: int, start: float, text: str = "YES") -> SupervisionSegment:
    return SupervisionSegment(f"s-{recording}-{channel}-{start}", recording, start, 1.5, channel, text, speaker="s")


SEGMENTS = [segment("b", 0, 0.0), segment("a", 1, 10.0), segment("a", 1, 9.0, "NO ONE"), segment("a", 0, 2.25)]


def test_the_file_is_sorted_and_labelled(tmp_path: Path) -> None:
    write_stm(tmp_path / "ref.stm", SEGMENTS, label=lambda segment: f"O,{segment.recording_id}")
    assert (tmp_path / "ref.stm").read_text().splitlines() == [
        "a A s 2.250 3.750 <O,a> YES",
        "a B s 9.000 10.500 <O,a> NO ONE",
        "a B s 10.000 11.500 <O,a> YES",
        "b A s 0.000 1.500 <O,b> YES",
    ]


def test_reco2file_and_channel_lists_each_side_once(tmp_path: Path) -> None:
    write_reco2file_and_channel(tmp_path / "reco2file_and_channel", SEGMENTS)
    assert (tmp_path / "reco2file_and_channel").read_text() == "a-A a A\na-B a B\nb-A b A\n"


def test_a_third_channel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="channel 2"):
        write_stm(tmp_path / "ref.stm", [segment("a", 2, 0.0)])


def test_a_reference_made_from_the_utterances_passes(tmp_path: Path) -> None:
    path = tmp_path / "ref.stm"
    write_stm(path, SEGMENTS)
    check_stm(path, SEGMENTS)
    path.write_text(f"** of NIST\n  ;; indented\n \n{path.read_text()}")
    check_stm(path, SEGMENTS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines[1:], "no reference for utterance"),
        (lambda lines: [*lines, "c A s 0 1 YES"], "no utterance at this time"),
        (lambda lines: [lines[0], lines[2], lines[1], lines[3]], "not sorted"),
        (lambda lines: [*lines, "c A s"], r"ref.stm:5: not `file"),
        (lambda lines: [*lines, "c A s zero one YES"], r"ref.stm:5: not `file"),
        (lambda lines: [*lines, "c A s 2 1 YES"], r"ref.stm:5: .* before it begins"),
        (lambda lines: [*lines, "c A s 1 1.0 YES"], r"ref.stm:5: the segment from 1 to 1.0 has no length"),
        (lambda lines: [*lines, "c A s 2 nan YES"], r"ref.stm:5: .* before it begins"),
    ],
)
def test_a_reference_out_of_step_is_refused(
    tmp_path: Path, change: Callable[[list[str]], list[str]], message: str
) -> None:
    path = tmp_path / "ref.stm"
    write_stm(path, SEGMENTS)
    path.write_text("\n".join(change(path.read_text().splitlines())) + "\n")
    with pytest.raises(InputError, match=message):
        check_stm(path, SEGMENTS)


def test_a_reference_that_is_not_utf8_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "ref.stm").write_bytes(b"a A s 0 1 YES\na A s 1 2 CAF\xe9\n")
    with pytest.raises(InputError, match=r"ref.stm:2: not UTF-8"):
        check_stm(tmp_path / "ref.stm", SEGMENTS)
