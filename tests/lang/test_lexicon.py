from __future__ import annotations

from pathlib import Path

import pytest

from asr_am.errors import InputError
from asr_am.lang.lexicon import Pronunciation, disambiguate, mark_positions, read_lexicon


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_reads_variants_noises_and_adds_unknown(tmp_path: Path) -> None:
    spoken = write(tmp_path / "lexicon.txt", "THE DH AH\nTHE DH IY\nA AH\nCOUGH SPN\n")
    noises = write(tmp_path / "nonspeech.txt", "[NOISE] NSN\n[LAUGHTER] LAU\n")
    lexicon = read_lexicon(spoken, noises)
    assert lexicon.words == ["<unk>", "A", "COUGH", "THE", "[LAUGHTER]", "[NOISE]"]
    assert lexicon.silence_phones == ("SIL", "SPN", "NSN", "LAU")
    assert lexicon.nonsilence_phones == ("AH", "DH", "IY")
    assert [e.phones for e in lexicon.entries if e.word == "THE"] == [("DH", "AH"), ("DH", "IY")]


def test_position_markers(tmp_path: Path) -> None:
    lexicon = mark_positions(read_lexicon(write(tmp_path / "lexicon.txt", "A AH\nAB AH B\nCAT K AE T\n")))
    phones = {entry.word: " ".join(entry.phones) for entry in lexicon.entries}
    assert phones == {"A": "AH_S", "AB": "AH_B B_E", "CAT": "K_B AE_I T_E", "<unk>": "SPN"}
    assert ("AH_B", "AH_E", "AH_I", "AH_S") in lexicon.roots
    assert sorted(p for root in lexicon.roots for p in root) == sorted(
        (*lexicon.silence_phones, *lexicon.nonsilence_phones)
    )


def test_phones_that_differ_in_stress_share_a_root(tmp_path: Path) -> None:
    text = "A AH0\nA AH1\nAN AE1 N\nBE B IY\nTWO 2 9\n"
    lexicon = read_lexicon(write(tmp_path / "lexicon.txt", text))
    assert lexicon.roots[3:] == (("2",), ("9",), ("AE1",), ("AH0", "AH1"), ("B",), ("IY",), ("N",))
    marked = mark_positions(lexicon)
    assert set(marked.roots[6]) == {f"AH{stress}_{position}" for stress in "01" for position in "BEIS"}


def test_disambiguation_as_in_kaldi() -> None:
    entries = tuple(
        Pronunciation(word, tuple(phones.split()))
        for word, phones in [("A", "x"), ("AB", "x y"), ("RED", "r d"), ("READ", "r d"), ("Z", "z")]
    )
    numbered, highest = disambiguate(entries)
    # A begins AB; RED and READ are homophones; AB and Z need nothing.
    assert [number for _, number in numbered] == [1, 0, 1, 2, 0]
    assert highest == 2


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("A AH\nB\n", 2, "empty pronunciation"),
        ("A AH\n\nB B\n", 2, "empty line"),
        ("A AH\nB B\nA AH\n", 3, "same pronunciation"),
        ("<s> SIL\n", 1, "reserved"),
        ("</s> SIL\n", 1, "reserved"),
        ("#0 AH\n", 1, "reserved"),
        ("A #1\n", 1, "reserved"),
        ("A <eps>\n", 1, "reserved"),
        ("A AH\nB SIL B\n", 2, "silence phone"),
        ("A AH\n<unk> AH\n", 2, "<unk>"),
        (b"A AH\nCAF\xc9 K\n", 2, "UTF-8"),
    ],
)
def test_bad_lexicon_is_named_with_its_line(tmp_path: Path, text: str | bytes, line: int, what: str) -> None:
    path = write(tmp_path / "lexicon.txt", text)
    with pytest.raises(InputError) as error:
        read_lexicon(path)
    assert str(error.value).startswith(f"{path}:{line}: ")
    assert what in str(error.value)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_lexicon(tmp_path / "lexicon.txt")
    with pytest.raises(InputError, match="is empty"):
        read_lexicon(write(tmp_path / "lexicon.txt", ""))
    with pytest.raises(InputError, match="no pronunciation made of speech"):
        read_lexicon(write(tmp_path / "lexicon.txt", "HM SPN\n"))
    good = write(tmp_path / "lexicon.txt", "A AH\n")
    with pytest.raises(InputError, match=r"nonspeech.txt:1: a noise has exactly one phone"):
        read_lexicon(good, write(tmp_path / "nonspeech.txt", "[N] NSN NSN\n"))
    with pytest.raises(InputError, match=r"lexicon.txt:1: AH is a silence phone|is a silence phone"):
        read_lexicon(write(tmp_path / "lexicon.txt", "A AH B\n"), write(tmp_path / "nonspeech.txt", "[N] AH\n"))


def test_lexicon_with_markers_already_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="position marker"):
        mark_positions(read_lexicon(write(tmp_path / "lexicon.txt", "A AH\nAB AH_B B\n")))
