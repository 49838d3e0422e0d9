"""Holds out training speakers as dev and gives each set its own speakers.

The choice depends only on a hash of the names, so the same directory gives the same dev set.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import replace

from lhotse import SupervisionSegment

from asr_am.errors import InputError
from local.kaldi.sets import CorpusSet

SHARE = 0.08  # of the training speech
LONGEST = 5 * 3600.0  # seconds, because every decoding setting is tried on all of it
MIN_SPEAKERS = 2
MAX_SHARE = 0.25  # largest share of the training speech to hold out
BIGGEST = MAX_SHARE / MIN_SPEAKERS  # largest share of a held-out speaker


def hold_out(train: CorpusSet) -> tuple[CorpusSet, CorpusSet, str]:
    """Returns (train without dev, dev, description). Raises InputError if there are too few utterances to divide."""
    by_speaker: dict[str, list[SupervisionSegment]] = defaultdict(list)
    for utterance in train.utterances:
        by_speaker[utterance.speaker].append(utterance)
    one_each = len(by_speaker) > 0.9 * len(train.utterances)
    total = max(train.seconds, 1e-9)
    wanted = min(SHARE, LONGEST / total)
    shares = {speaker: _seconds(group) / total for speaker, group in by_speaker.items()}
    small = {speaker: share for speaker, share in shares.items() if share <= BIGGEST}
    if not one_each and len(small) >= MIN_SPEAKERS:
        chosen = _choose(small, MIN_SPEAKERS, wanted)
        held = {utterance.id for speaker in chosen for utterance in by_speaker[speaker]}
        share = sum(shares[speaker] for speaker in chosen)
        names = " ".join(sorted(chosen))
        how = f"{len(chosen)} of {len(by_speaker)} training speakers ({share:.1%} of the speech): {names}"
    else:
        held = _choose({utterance.id: utterance.duration / total for utterance in train.utterances}, 2, wanted)
        few = f"only {len(small)} of {len(by_speaker)} speakers have {BIGGEST:.1%} of the speech or less"
        why = "every utterance has a speaker of its own" if one_each else few
        how = (
            f"{len(held)} of {len(train.utterances)} training utterances, since {why}; their speakers are in train, too"
        )
    if len(held) >= len(train.utterances):
        raise InputError(
            f"{train.folder}: {len(train.utterances)} usable utterances are too few to hold some out; give --dev"
        )
    kept = [utterance for utterance in train.utterances if utterance.id not in held]
    dev = [utterance for utterance in train.utterances if utterance.id in held]
    return replace(train, utterances=kept), replace(train, utterances=dev), how


def _seconds(utterances: list[SupervisionSegment]) -> float:
    return sum(utterance.duration for utterance in utterances)


def _choose(shares: dict[str, float], at_least: int, wanted: float) -> set[str]:
    """Returns names with about the share `wanted` in total, in the order of their hashes, skipping any that is too
    large.
    """
    chosen: set[str] = set()
    total = 0.0
    for name in sorted(shares, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if len(chosen) >= at_least and total >= wanted:
            break
        if len(chosen) < at_least or total + shares[name] <= 1.5 * wanted:
            chosen.add(name)
            total += shares[name]
    return chosen


def separate_speakers(sets: dict[str, CorpusSet]) -> dict[str, list[str]]:
    """Renames speakers of dev and test that an earlier set also has, `amy` to `amy-dev`, and returns their names by
    set.

    Statistics per speaker (CMVN, fMLLR, i-vectors) then come from one set only.
    """
    names = {subset: {utterance.speaker for utterance in corpus.utterances} for subset, corpus in sets.items()}
    taken = set().union(*names.values())
    earlier: set[str] = set()
    shared: dict[str, list[str]] = {}
    for subset in ("train", "dev", "test"):
        shared[subset] = sorted(names[subset] & earlier)
        earlier |= names[subset]
        new = {name: name for name in names[subset]}
        for name in shared[subset]:
            new[name] += f"-{subset}"
            while new[name] in taken:
                new[name] += "+"
        sets[subset].utterances = [
            replace(utterance, speaker=new[utterance.speaker]) for utterance in sets[subset].utterances
        ]
    return {subset: names for subset, names in shared.items() if names}
