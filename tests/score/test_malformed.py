"""Damaged input is either scored or rejected with an InputError that names the file."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asr_am.errors import InputError
from asr_am.score import Score, score_files
from asr_am.score.csrfilt import _filter
from asr_am.score.glm import RuleSet
from asr_am.score.output import to_json, write_alignments

STM = b""";; LABEL "O" "Overall" "All"
sw_1 A spk1 0.00 2.50 <O> he's (uh) going to { school / the school / @ }
sw_1 A spk1 2.50 4.00 <O,M> twenty-one wo- caf\xe9
sw_1 B spk2 0.00 4.00 IGNORE_TIME_SEGMENT_IN_SCORING
en_2 A spk3 1.00 9.00 { a { b / c } / d } yes
"""
CTM = b""";; a comment
en_2 A 1.1 0.3 he'd 0.9
en_2 A 1.5 0.3 yes 0.8
sw_1 A 0.10 0.40 he's 0.5
sw_1 A 2.70 0.30 gonna 0.5
"""
GLM = b""";; rules
* max_nrules = '9'
* case_sensitive = 'F'
;; INPUT_DEPENDENT_APPLICATION = "ctm|stm"
GONNA => GOING TO / [ ] __ [ ]
[HE'D] => [{HE HAD / HE WOULD}] / [ ] __ [ ]
"""
PIECES = b"""{ } / ( ) - => [ ] _ < > ; * " ' \\ @ {/} {a/} (( )( <ALT> 1e999 nan ;;""".split()
SPLICES = (*PIECES, b" ", b"\n", b"\t", b"\x00", b"\xff", b"\r", b"{ / }", b"{" * 200, b"x" * 20_000)


def damage(data: bytes, chance: random.Random) -> bytes:
    """Cuts, copies, removes and inserts a few pieces."""
    for _ in range(chance.randint(1, 4)):
        at, to = sorted(chance.randrange(len(data) + 1) for _ in range(2))
        to = min(to, at + chance.choice((1, 5, 200)))
        kind = chance.randrange(5)
        if kind == 0:
            data = data[:at] + data[to:]
        elif kind == 1:
            data = data[:at] + data[at:to] * 2 + data[to:]
        elif kind == 2:
            data = data[:at]
        else:
            data = data[:at] + chance.choice(SPLICES) + data[at:]
    return data


def check(folder: Path, stm: bytes, ctm: bytes, glm: bytes | None) -> None:
    paths = folder / "ref.stm", folder / "hyp.ctm", folder / "rules.glm"
    for path, data in zip(paths, (stm, ctm, glm or b""), strict=True):
        path.write_bytes(data)
    try:
        score = score_files(paths[0], paths[1], None if glm is None else paths[2])
    except InputError as error:
        assert str(folder) in str(error)
        assert "\n" not in str(error)
        return
    assert isinstance(score, Score)
    assert to_json(score)["all"]["sentences"] == len(score.segments)
    write_alignments(score, folder / "errors.txt")


@pytest.mark.parametrize("seed", range(10))
def test_damaged_files(seed: int, tmp_path: Path) -> None:
    for case in range(60):
        chance = random.Random(1000 * seed + case)
        files = [STM, CTM, GLM]
        which = chance.randrange(3)
        files[which] = damage(files[which], chance)
        check(tmp_path, files[0], files[1], files[2] if which == 2 or chance.random() < 0.7 else None)


@settings(max_examples=60)
@given(stm=st.binary(max_size=200), ctm=st.binary(max_size=200), glm=st.none() | st.binary(max_size=200))
def test_noise(tmp_path_factory: pytest.TempPathFactory, stm: bytes, ctm: bytes, glm: bytes | None) -> None:
    folder = tmp_path_factory.mktemp("noise")
    check(folder, stm, ctm, glm)
    check(folder, STM + stm, CTM + ctm, None if glm is None else GLM + glm)


@pytest.mark.parametrize(
    ("text", "filtered"),
    [(b"(" + b"a " * 40_000 + b")", b"(A) " * 39_999 + b"(A)"), (b"A" + b"\t" * 90_000 + b"B", None)],
    ids=["words that may be left out", "blanks"],
)
def test_a_long_text_is_filtered_in_one_pass(text: bytes, filtered: bytes | None) -> None:
    """Each took a minute or more, as the text was searched from the start again for each word, or from each blank."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("takes more than 10 s"))
    signal.alarm(10)
    try:
        assert _filter(text, RuleSet([], case_sensitive=False)) == (filtered or text)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
