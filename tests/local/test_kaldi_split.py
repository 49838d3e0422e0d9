from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from lhotse import SupervisionSegment

from asr_am.errors import InputError
from local.kaldi.sets import CorpusSet
from local.kaldi.split import hold_out, separate_speakers


def corpus(counts: dict[str, int], seconds: float = 1.0) -> CorpusSet:
    """Returns `counts` utterances, each of `seconds`, for each speaker."""
    utterances = [
        SupervisionSegment(f"{name}-{index}", f"{name}-{index}", 0.0, seconds, speaker=name)
        for name, count in counts.items()
        for index in range(count)
    ]
    return CorpusSet(Path("train"), {}, utterances)


def speakers(part: CorpusSet) -> set[str]:
    return {utterance.speaker for utterance in part.utterances}


@pytest.mark.parametrize("big", [10, 400])
def test_about_8_percent_of_the_speech_whoever_speaks_most(big: int) -> None:
    complete = corpus({f"s{n}": 10 for n in range(60)} | {"talker": big})
    train, dev, _ = hold_out(complete)
    assert 0.07 < dev.seconds / complete.seconds < 0.13
    assert len(speakers(dev)) >= 2 and not speakers(dev) & speakers(train)
    assert train.seconds + dev.seconds == complete.seconds


def test_of_much_speech_five_hours() -> None:
    """Not 8 %, because every window and weight is tried on all of dev."""
    _, dev, _ = hold_out(corpus({f"s{n}": 20 for n in range(600)}, 90.0))
    assert 5.0 <= dev.seconds / 3600 < 6.0


def test_a_new_speaker_leaves_the_others_in_their_order() -> None:
    """The choice is by a hash of the name and does not depend on the order of the list."""
    counts = {f"s{n}": 10 for n in range(50)}
    forward, backward = (hold_out(corpus(dict(items)))[1] for items in (counts.items(), reversed(counts.items())))
    assert speakers(forward) == speakers(backward) != {"s0", "s1", "s2", "s3"}


@pytest.mark.parametrize("counts", [{"amy": 50}, {"amy": 50, "bob": 50}, {f"u{n}": 1 for n in range(50)}])
def test_utterances_where_speakers_are_too_few_or_unknown(counts: dict[str, int]) -> None:
    train, dev, how = hold_out(corpus(counts))
    assert "utterances, since" in how and 4 <= len(dev.utterances) <= 8
    sets = {"train": train, "dev": dev, "test": corpus({"amy": 3})}
    renamed = separate_speakers(sets)
    assert not speakers(sets["train"]) & (speakers(sets["dev"]) | speakers(sets["test"]))
    assert renamed.get("test") == (["amy"] if "amy" in counts else None)


def test_new_names_are_nobodys() -> None:
    train, dev, test = corpus({"amy": 1}), corpus({"bob": 1, "amy-test": 1}), corpus({"amy": 2, "amy-test": 3})
    sets = {"train": train, "dev": dev, "test": test}
    assert separate_speakers(sets) == {"test": ["amy", "amy-test"]}
    counts = Counter(utterance.speaker for part in sets.values() for utterance in part.utterances)
    assert counts == {"amy": 1, "bob": 1, "amy-test": 1, "amy-test+": 2, "amy-test-test": 3}


@pytest.mark.parametrize("talkers", [{"a": 200, "b": 300}, {"c": 200, "d": 180}, {"e": 130, "f": 130, "g": 130}])
def test_speakers_too_big_to_hold_out_are_passed_over(talkers: dict[str, int]) -> None:
    """A few small speakers make the dev set, wherever the names come in the order of hashes."""
    train, dev, how = hold_out(corpus(talkers | {f"s{n}": 50 for n in range(8)}))
    assert "training speakers (" in how and talkers.keys() <= speakers(train)
    assert not speakers(dev) & speakers(train) and dev.seconds / (dev.seconds + train.seconds) <= 0.25


def test_the_log_says_why_no_speaker_is_held_out() -> None:
    _, dev, how = hold_out(corpus({"amy": 50, "bob": 50, "cy": 50, "dee": 5}))
    assert "since only 1 of 4 speakers have 12.5% of the speech or less" in how and len(dev.utterances) == 13


def test_two_utterances_cannot_be_divided() -> None:
    with pytest.raises(InputError, match="too few to hold some out; give --dev"):
        hold_out(corpus({"amy": 2}))
