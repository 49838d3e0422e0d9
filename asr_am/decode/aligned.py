"""Alignments as words and phones with their times, as CTM and TextGrid files, and as counts of pronunciations.

Shapes: T frames, R runs of equal labels.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from asr_am.data.manifests import read_supervisions
from asr_am.data.speed import copies_of
from asr_am.data.textfile import split_words
from asr_am.decode.ctm import CtmWord, write_ctm
from asr_am.decode.hypotheses import align_to_phones, time_words
from asr_am.decode.textgrid import write_textgrids
from asr_am.hmm.alignments import read_alignments, runs_of
from asr_am.hmm.states import StateTable
from asr_am.lang.lang_dir import Lang
from asr_am.lang.lexicon_probs import SENTENCE_END, SENTENCE_START, Spoken
from asr_am.lang.transcripts import read_transcripts

log = logging.getLogger(__name__)


def aligned_phones(labels_T: np.ndarray, states: StateTable, lang: Lang) -> list[CtmWord]:
    """Returns the phones of an alignment with their times. `labels_T` has the graph label of each frame."""
    runs = runs_of(labels_T, np.array([0, len(labels_T)]), states)
    first_R = runs.state_R == 0
    starts = runs.start_R[first_R]
    lengths = np.diff(np.append(starts, len(labels_T)))
    phones = runs.windows_R3[first_R, 1]
    return [
        CtmWord(int(start), int(length), lang.phone_names[phone], 1.0)
        for start, length, phone in zip(starts, lengths, phones.tolist(), strict=True)
    ]


def aligned_words(text: str, labels_T: np.ndarray, states: StateTable, lang: Lang) -> list[CtmWord]:
    """Returns the words of a transcript with their times.

    Args:
        text: the transcript. A word outside the lexicon is aligned as `<unk>` and keeps its name.
    """
    timed = time_words(lang.word_ids(text), labels_T, states, lang)
    return [CtmWord(word.start, word.frames, name, 1.0) for word, name in zip(timed, split_words(text), strict=False)]


def count_pairs(data_dir: Path, align_dir: Path, lang: Lang) -> Counter[tuple[Spoken, bool, Spoken]]:
    """Counts which pronunciation follows which in the aligned training speech, with and without silence between them.

    Speed-perturbed copies are left out.

    Args:
        align_dir: folder of the GMM system, exp/<corpus>/align/<system>.
    """
    states = StateTable.load(align_dir / "states.npz")
    texts = dict(read_transcripts(data_dir, "train"))
    copies = copies_of(list(texts))
    counts = Counter[tuple[Spoken, bool, Spoken]]()
    for utterance, labels_T in read_alignments(align_dir / "ali", "train"):
        if utterance in copies:
            continue
        words = lang.word_ids(" ".join(texts[utterance]))
        phones = [lang.phones[phone.word] for phone in aligned_phones(labels_T, states, lang)]
        spans = align_to_phones(words, phones, lang)
        if spans is None or len(spans) < len(words):
            continue
        left, end = SENTENCE_START, 0
        for word, (first, last) in zip(words, spans, strict=True):
            right = lang.word_names[word], tuple(lang.phone_names[phone] for phone in phones[first:last])
            counts[left, first > end, right] += 1
            left, end = right, last
        counts[left, len(phones) > end, SENTENCE_END] += 1
    return counts


def write_alignment_ctms(
    data_dir: Path, align_dir: Path, lang: Lang, out: Path, sets: Sequence[str] = ()
) -> list[Path]:  # fmt: skip
    """Writes the alignments of a GMM system as <set>.words.ctm and <set>.phones.ctm, and as <set>/*.TextGrid.

    Speed-perturbed copies are left out.

    Args:
        align_dir: folder of the system, exp/<corpus>/align/<system>.
        sets: names of the sets. Default: all that are aligned.

    Returns:
        The CTM files, and the folders of TextGrid files.

    Raises:
        InputError: a file is missing or damaged.
    """
    states = StateTable.load(align_dir / "states.npz")
    out.mkdir(parents=True, exist_ok=True)
    files = []
    for subset in sets or sorted(path.stem for path in (align_dir / "ali").glob("*.ark")):
        segments = {segment.id: segment for segment in read_supervisions(data_dir, subset)}
        words, phones, copies = {}, {}, copies_of(list(segments))
        for utterance, labels_T in read_alignments(align_dir / "ali", subset):
            if utterance in copies:
                continue
            words[utterance] = aligned_words(segments[utterance].text or "", labels_T, states, lang)
            phones[utterance] = aligned_phones(labels_T, states, lang)
        for name, found in (("words", words), ("phones", phones)):
            files.append(out / f"{subset}.{name}.ctm")
            write_ctm(files[-1], segments, found)
            log.info("%s: %d %s of %d utterances", files[-1], sum(map(len, found.values())), name, len(found))
        write_textgrids(out / subset, segments, {"words": words, "phones": phones})
        files.append(out / subset)
    return files
