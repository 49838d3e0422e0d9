"""ROVER: cases worked out by hand, and random CTM files beside NIST's program where it is installed."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from asr_am.errors import InputError
from asr_am.score.rover import Voting, main, rover

CASES = int(os.environ.get("SCTK_CASES", "30"))
needs_sctk = pytest.mark.skipif(shutil.which("sctk") is None, reason="sctk is not installed")


def write(path: Path, *rows: tuple[float, float, str, float], file: str = "f") -> Path:
    path.write_text(
        "".join(f"{file} A {begin} {length} {word} {confidence}\n" for begin, length, word, confidence in rows),
        encoding="utf-8",
    )
    return path


def combine(tmp_path: Path, systems: list[str], voting: Voting) -> str:
    """Returns the winners' words, for systems of words without pauses. A number after a word is its confidence in %."""
    paths = []
    for number, text in enumerate(systems):
        words = [(word.rstrip("0123456789"), word) for word in text.split()]
        rows = [(0.5 * i, 0.5, name, float(word[len(name) :] or 50) / 100) for i, (name, word) in enumerate(words)]
        paths.append(write(tmp_path / f"{number}.ctm", *rows))
    rover(paths, tmp_path / "out.ctm", voting)
    return " ".join(line.split()[4] for line in (tmp_path / "out.ctm").read_text().splitlines())


@pytest.mark.parametrize(
    ("systems", "voting", "expected"),
    [
        (["a b c", "a x c", "a x c"], Voting(), "a x c"),
        (["a b c", "a x c", "a y c"], Voting(), "a b c"),  # a tie: the first system
        (["a c", "a b c", "a b c"], Voting(), "a b c"),
        (["a b c", "a c", "a c"], Voting(), "a c"),
        (["a c", "a b c"], Voting(), "a b c"),  # a tie of a word and none: the word has its slot first
        (["a B c", "A b c", "a x c"], Voting(), "a B c"),
        (["a b90 c", "a x20 c", "a x20 c"], Voting(alpha=0.0), "a b c"),
        (["a b90 c", "a x20 c", "a x95 c"], Voting(alpha=0.0), "a b c"),
        (["a b90 c", "a x20 c", "a x95 c"], Voting(alpha=0.0, method="maximum"), "a x c"),
        (["a b90 c", "a x20 c", "a x20 c"], Voting(alpha=0.9), "a x c"),
        (["a b20 c", "a c", "a c"], Voting(alpha=0.0, missing=0.1), "a b c"),
        (["a b20 c", "a c", "a c"], Voting(alpha=0.0, missing=0.3), "a c"),
    ],
)
def test_votes(tmp_path: Path, systems: list[str], voting: Voting, expected: str) -> None:
    assert combine(tmp_path, systems, voting) == expected


def test_times_and_confidences_are_means(tmp_path: Path) -> None:
    one = write(tmp_path / "1.ctm", (1.0, 0.5, "a", 0.5), (9.0, 0.5, "b", 0.25))
    two = write(tmp_path / "2.ctm", (1.2, 0.1, "a", 1.0))
    rover([one, two], tmp_path / "out.ctm", Voting(alpha=0.5))
    assert (tmp_path / "out.ctm").read_text() == "f A 1.100 0.300 a 0.750000\nf A 9.000 0.500 b 0.250000\n"


def test_a_system_without_a_channel_has_no_words_there(tmp_path: Path) -> None:
    one, two = (
        write(tmp_path / "1.ctm", (1.0, 0.5, "a", 0.5)),
        write(tmp_path / "2.ctm", (1.0, 0.5, "b", 1.0), file="g"),
    )
    assert main(["--ctm", str(one), str(two), str(two), "--out", str(tmp_path / "out.ctm")]) == 0
    assert (tmp_path / "out.ctm").read_text() == "g A 1.000 0.500 b 1.000000\n"


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path / "1.ctm", (1.0, 0.5, "a", 0.5))
    bad = tmp_path / "bad.ctm"
    bad.write_text("f A 1.0 0.5 a high\n")
    (tmp_path / "nan.ctm").write_text("f A 1.0 0.5 a nan\n")
    for arguments, message in (
        ([one], "two systems"), ([one, bad], "bad.ctm:1: confidence 'high'"),
        ([one, tmp_path / "nan.ctm"], "nan.ctm:1: confidence 'nan'"), ([one, tmp_path / "no.ctm"], "no.ctm"),
        ([one, one, "--alpha", "2"], "--alpha 2: must be"), ([one, one, "--method", "best"], "--method"),
    ):  # fmt: skip
        assert main(["--out", str(tmp_path / "out.ctm"), "--ctm", *map(str, arguments)]) == 1
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out.ctm").exists()
    before = one.read_bytes()
    assert main(["--out", str(one), "--ctm", str(one), str(one)]) == 1 and one.read_bytes() == before
    assert "1.ctm: is read, so it would be replaced" in capsys.readouterr().err
    with pytest.raises(InputError, match="two systems"):
        rover([one], tmp_path / "out.ctm", Voting())


def random_system(rng: random.Random, truth: list[tuple[str, float]], *, confidences: bool) -> list[str]:
    """Returns CTM lines of a system's errors on words and the times they begin at. It has a word at least."""
    rows: list[tuple[float, str]] = []
    for word, begin in truth:
        kind = rng.random()
        if kind < 0.15 and rows:
            continue
        for place in range(2 if kind > 0.9 else 1):
            name = word if rng.random() < 0.6 else rng.choice("abcdeABC")
            confidence = f" {rng.randint(0, 20) / 20:.2f}" if confidences else ""
            start = begin + 0.1 * place + rng.randint(-5, 5) / 100
            rows.append((start, f"A {start:.2f} {rng.randint(1, 30) / 100:.2f} {name}{confidence}\n"))
    return [line for _, line in sorted(rows)]


@needs_sctk
@pytest.mark.parametrize("seed", range(CASES))
def test_random_files_beside_nists_program(tmp_path: Path, seed: int) -> None:
    """NIST's program gets a channel at a time: where a system has no words left, it takes one of the next channel."""
    rng = random.Random(seed)
    count, confidences = rng.randint(2, 5), rng.random() < 0.8
    alpha = rng.choice([1.0, 0.5, 0.25, 0.0]) if confidences else 1.0
    missing, method = rng.choice([0.0, 0.35, 0.8]), rng.choice(["average", "maximum"])
    command = ["sctk", "rover", "-m", {"average": "meth1", "maximum": "maxconf"}[method], "-a", str(alpha)]
    command += ["-c", str(missing)]
    ours, expected = [tmp_path / f"{i}.ctm" for i in range(count)], ""
    for file in ("f", "g")[: rng.randint(1, 2)]:
        truth, time = [], 1.0
        for _ in range(rng.randint(1, 40)):
            truth.append((rng.choice("abcdeABC"), time))
            time += rng.choice([0.2, 0.3, 0.6, 1.3, 3.0])
        one = [*command, "-o", str(tmp_path / "nist.ctm")]
        for path in ours:
            lines = "".join(f"{file} {line}" for line in random_system(rng, truth, confidences=confidences))
            with path.open("a") as both:
                both.write(lines)
            (tmp_path / f"{file}_{path.name}").write_text(lines)
            one += ["-h", str(tmp_path / f"{file}_{path.name}"), "ctm"]
        subprocess.run(one, capture_output=True, check=True)
        expected += (tmp_path / "nist.ctm").read_text().lower()
    rover(ours, tmp_path / "ours.ctm", Voting(alpha, missing, method))  # type: ignore[arg-type]
    assert (tmp_path / "ours.ctm").read_text().lower() == expected
