"""Small copies of the LDC's discs of telephone speech: their folders, file names and formats, with generated speech."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.support.sphere_files import write_sphere
from tests.support.spoken_tones import RATE, Voice

# Words with the phones of the Mississippi State dictionary. TV is an acronym.
SPOKEN = {
    "yeah": "y ae", "no": "n ow", "well": "w eh l", "really": "r iy l iy", "right": "r ay t", "maybe": "m ey b iy",
    "dogs": "d ao g z", "school": "s k uw l", "TV": "t iy v iy", "they": "dh ey", "uh-huh": "ah hh ah",
    "house": "hh aw s",
}  # fmt: skip
DICTIONARY = (
    "#  file: $SWB/data/dictionary/sw-ms98-dict.text\n\n"
    + "".join(f"{word} {phones}\n" for word, phones in SPOKEN.items())
    + "they_1 dh eh\nsch[ool]- s k\n[laughter-yeah] y ae\n{housey} hh aw s iy\n"
    + "[noise] nsn\n[laughter] lau\n[silence] sil\n"
)
GLM = """;; name en20000405_hub5.glm
* name = "en20000405_hub5.glm"
* desc = "hub5"
* format = 'NIST1'
* max_nrules = '100'
* copy_no_hit = 'T'
* case_sensitive = 'F'

[UH-HUH] => [UHHUH] / [ ] __ [ ]
[HUM] => [%HESITATION] / [ ] __ [ ]
"""
LETTERS = "AB"
STM_HEADER = ';; CATEGORY "0" "" ""\n;; LABEL "O" "Overall" "All Segments in the Test Set"\n'


@dataclass(frozen=True)
class Turn:
    """What one side says."""

    channel: int
    begin: float
    end: float
    words: tuple[str, ...]


def make_call(seed: int, turns: int, voices: tuple[int, int] | None = None) -> tuple[np.ndarray, list[Turn]]:
    """Returns the samples of a call, int16 [N, 2], and its turns, by both sides alternately."""
    rng = np.random.default_rng(seed)
    speakers = [Voice(SPOKEN, voice) for voice in voices or (2 * seed, 2 * seed + 1)]
    parts, found, now = [], [], 0
    for number in range(turns):
        words = tuple(rng.choice(list(SPOKEN), rng.integers(2, 5)))
        speech_N = speakers[number % 2].say(words)
        both_NC = rng.normal(0, 20, (len(speech_N) + RATE // 2, 2)).astype(np.int16)
        both_NC[: len(speech_N), number % 2] += speech_N
        parts.append(both_NC)
        found.append(Turn(number % 2, now / RATE, (now + len(speech_N)) / RATE, words))
        now += len(both_NC)
    return np.concatenate(parts), found


def write_switchboard(folder: Path, calls: int = 10, turns: int = 10) -> None:
    """Writes LDC97S62 with the Mississippi State release on it, whose folder may be apart."""
    release = folder / "transcriptions/swb_ms98_transcriptions"
    release.mkdir(parents=True)
    (release / "sw-ms98-dict.text").write_text(DICTIONARY)
    for number in range(calls):
        name = 2001 + number
        samples_NC, spoken = make_call(number, turns)
        write_sphere(folder / f"swb1_d{1 + number % 2}/data/sw0{name}.sph", samples_NC)
        marks = {0: "[laughter-{}]", 1: "{}", 2: "{}_1"}
        for side, letter in enumerate(LETTERS):
            lines, last = [], 0.0
            for turn in (turn for turn in spoken if turn.channel == side):
                words = [marks[number % 3].format(w) if w in ("yeah", "they") else w for w in turn.words]
                text = " ".join(words)
                lines += [(last, turn.begin, "[silence]"), (turn.begin, turn.end, f"[noise] {text} <e_aside>")]
                last = turn.end
            path = release / f"{name // 100}/{name}/sw{name}{letter}-ms98-a-trans.text"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(
                "".join(
                    f"sw{name}{letter}-ms98-a-{i:04d} {begin:.6f} {end:.6f} {text}\n"
                    for i, (begin, end, text) in enumerate(lines, start=1)
                )
            )


def write_fisher(speech: Path, text: Path, part: int, calls: int = 2, turns: int = 6) -> None:
    """Writes LDC2004S13 and LDC2004T19 (part 1) or LDC2005S13 and LDC2005T19 (part 2), compressed by shorten."""
    (text / "doc").mkdir(parents=True)
    rows = ["CALL_ID,DATE_TIME,TOPICID,SIG_GRADE,CNV_GRADE,APIN,ASX.DL,APHNUM,APHSET,APHTYP,BPIN,BSX.DL,BPHNUM"]
    for number in range(calls):
        call = f"{5851 * (part - 1) + number + 1:05d}"
        samples_NC, spoken = make_call(1000 * part + number, turns)
        disc = speech / f"fe_03_p{part}_sph{1 + number}"
        write_sphere(disc / f"audio/{call[:3]}/fe_03_{call}.sph", samples_NC, shorten=True)
        lines = [f"# fe_03_{call}.sph", "# Transcribed at the LDC", ""]
        for turn in spoken:
            words = " ".join(word.lower() for word in turn.words).replace("tv", "t._v.")
            words = f"(( {words} ))" if turn is spoken[-1] else f"[breath] {words}"
            lines += [f"{turn.begin:.2f} {turn.end:.2f} {LETTERS[turn.channel]}: {words}", ""]
        path = text / f"data/trans/{call[:3]}/fe_03_{call}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines))
        rows.append(f"{call},20021209_21:28:26,ENG01,2.0,3.0,1{call},f.a,1,1,1,2{call},m.a,1")
    (text / f"doc/fe_03_p{part}_calldata.tbl").write_text("\n".join(rows) + "\n")


def write_eval2000(speech: Path, text: Path, turns: int = 8) -> None:
    """Writes LDC2002S09 and LDC2002T43 with two Switchboard calls and one of CallHome."""
    english, reference = speech / "hub5e_00/english", text / "2000_hub5_eng_eval_tr/reference"
    reference.mkdir(parents=True)
    pem, stm = [], []
    for number, name in enumerate(("sw_4390", "sw_4484", "en_4156")):
        spoken = _write_test_call(english / f"{name}.sph", 500 + number, turns)
        for turn in sorted(spoken, key=lambda turn: (turn.channel, turn.begin)):
            side = LETTERS[turn.channel]
            place = f"{name} {side} {name}_{side} {turn.begin:.2f} {turn.end:.2f}"
            label = f"<O,{name[:2]},{'FM'[turn.channel]},{name[:2]}-{'FM'[turn.channel]}>"
            pem.append(f"{name} {side} unknown_speaker {turn.begin:.2f} {turn.end:.2f}")
            stm.append(f"{place} {label} {_reference(turn)}")
        pem.append(f"{name} A unknown_speaker {spoken[-1].end + 1:.2f} {spoken[-1].end + 2:.2f}")
        end = f"{spoken[-1].end + 1:.2f} {spoken[-1].end + 2:.2f}"
        stm.append(f"{name} A {name}_A {end} <O,sw,F,sw-F> IGNORE_TIME_SEGMENT_IN_SCORING")
    (english / "hub5e_00.pem").write_text(";; comment\n" + "\n".join(pem) + "\n")
    (reference / "hub5e00.english.000405.stm").write_text(STM_HEADER + "\n".join(stm) + "\n")
    (reference / "en20000405_hub5.glm").write_text(GLM)


def write_rt03(folder: Path, turns: int = 6) -> None:
    """Writes LDC2007S10."""
    references = folder / "data/references/eval03/english/cts"
    references.mkdir(parents=True)
    for number, name in enumerate(("sw_30000", "fsh_60262")):
        spoken = _write_test_call(folder / f"data/audio/eval03/english/cts/{name}.sph", 700 + number, turns)
        lines = [
            f"{name} {side} {name}_{side} {turn.begin:.2f} {turn.end:.2f} <o,f0,male> {_reference(turn)}"
            for turn in spoken
            for side in [turn.channel + 1]
        ]
        lines.append(f"{name} 1 inter_segment_gap 0.00 0.01 <o,,unknown>")
        (references / f"{name}.stm").write_text("\n".join(lines) + "\n")
    (folder / "data/trans_rules").mkdir(parents=True)
    (folder / "data/trans_rules/en20030506.glm").write_text(GLM)


def _write_test_call(path: Path, seed: int, turns: int) -> list[Turn]:
    samples_NC, spoken = make_call(seed, turns)
    write_sphere(path, np.concatenate([samples_NC, np.zeros((3 * RATE, 2), np.int16) + 5]))
    return spoken


def _reference(turn: Turn) -> str:
    """Returns the words as NIST writes them, once with an aside and a double parenthesis."""
    text = " ".join(turn.words).upper().replace("TV", "T V")
    return f"<B_ASIDE> {text} ((%HESITATION)" if turn.begin == 0 else text


WRITERS: dict[str, Callable[[Path], None]] = {
    "swbd": lambda root: write_switchboard(root / "swbd"),
    "fisher1": lambda root: write_fisher(root / "fisher1_speech", root / "fisher1_text", 1),
    "fisher2": lambda root: write_fisher(root / "fisher2_speech", root / "fisher2_text", 2, calls=1),
    "eval2000": lambda root: write_eval2000(root / "eval2000", root / "eval2000_text"),
    "rt03": lambda root: write_rt03(root / "rt03"),
}


def write_discs(root: Path) -> Path:
    """Writes all discs, each in a folder named as its option."""
    for write in WRITERS.values():
        write(root)
    return root
