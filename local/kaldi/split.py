"""Holding out training speakers as dev, and giving each set speakers of its own.

Which are held out depends on their names alone (through a hash), so the same directory gives the same dev set.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import replace

from lhotse import SupervisionSegment

from asr_am.errors import InputError
from local.kaldi.sets import CorpusSet

SHARE = 0.08  # of the speech of training
MIN_SPEAKERS = 2
MAX_SHARE = 0.25  # beyond which utterances are held out instead of speakers


def hold_out(train: CorpusSet) -> tuple[CorpusSet, CorpusSet, str]:
    """(train without dev, dev, what was done). InputError where there are too few utterances to divide."""
    by_speaker: dict[str, list[SupervisionSegment]] = defaultdict(list)
    for utterance in train.utterances:
        by_speaker[utterance.speaker].append(utterance)
    one_each = len(by_speaker) > 0.9 * len(train.utterances)
    chosen = set() if one_each else _choose({name: _seconds(group) for name, group in by_speaker.items()}, MIN_SPEAKERS)
    share = sum(_seconds(by_speaker[speaker]) for speaker in chosen) / max(train.seconds, 1e-9)
    if chosen and share <= MAX_SHARE and len(chosen) < len(by_speaker):
        held = {utterance.id for speaker in chosen for utterance in by_speaker[speaker]}
        names = " ".join(sorted(chosen))
        how = f"{len(chosen)} of {len(by_speaker)} training speakers ({share:.1%} of the speech): {names}"
    else:
        held = _choose({utterance.id: utterance.duration for utterance in train.utterances}, 2)
        why = "every utterance has a speaker of its own" if one_each else f"there are only {len(by_speaker)} speakers"
        how = f"{len(held)} of {len(train.utterances)} training utterances, since {why}; dev is of known speakers"
    if len(held) >= len(train.utterances):
        raise InputError(
            f"{train.folder}: {len(train.utterances)} usable utterances are too few to hold some out; give --dev"
        )
    kept = [utterance for utterance in train.utterances if utterance.id not in held]
    dev = [utterance for utterance in train.utterances if utterance.id in held]
    return replace(train, utterances=kept), replace(train, utterances=dev), how


def _seconds(utterances: list[SupervisionSegment]) -> float:
    return sum(utterance.duration for utterance in utterances)


def _choose(seconds: dict[str, float], at_least: int) -> set[str]:
    """Names with together about SHARE of the seconds, in the order of their hashes; big ones are passed over."""
    target = SHARE * sum(seconds.values())
    chosen: set[str] = set()
    total = 0.0
    for name in sorted(seconds, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if len(chosen) >= at_least and total >= target:
            break
        if len(chosen) < at_least or total + seconds[name] <= 1.5 * target:
            chosen.add(name)
            total += seconds[name]
    return chosen


def separate_speakers(sets: dict[str, CorpusSet]) -> dict[str, list[str]]:
    """Rename speakers of dev and test that an earlier set has too, `amy` to `amy-dev`; returns them by set.

    What is estimated per speaker (CMVN, fMLLR, i-vectors) is then estimated on the speech of one set.
    """
    taken: set[str] = set()
    shared: dict[str, list[str]] = {}
    for subset in ("train", "dev", "test"):
        names = {utterance.speaker for utterance in sets[subset].utterances}
        shared[subset] = sorted(names & taken)
        known = set(shared[subset])
        sets[subset].utterances = [
            replace(utterance, speaker=f"{utterance.speaker}-{subset}") if utterance.speaker in known else utterance
            for utterance in sets[subset].utterances
        ]
        taken |= {utterance.speaker for utterance in sets[subset].utterances}
    return {subset: names for subset, names in shared.items() if names}
