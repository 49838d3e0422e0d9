"""Makes the corpus minicts: generated two-party telephone conversations for trying and testing the recipes.

The speech is synthetic (espeak-ng), so error rates on it say nothing about human speech. The result depends on the
arguments and `conditions.VERSION`, not on the number of processes: every conversation has its own random stream.

    python -m local.minicts.prepare --out exp/minicts/data --hours 1 --speakers 40 --seed 0 --nj 2
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
from functools import partial
from pathlib import Path

import numpy as np

from asr_am.errors import InputError
from asr_am.parallel import parallel_map
from local.minicts.conditions import (
    DEV_SHARE,
    EN,
    SW,
    VERSION,
    WORDS_PER_CONVERSATION,
    WORDS_PER_SECOND,
    WORDS_PER_TEST_CONVERSATION,
    Condition,
)
from local.minicts.conversation import Call, hold
from local.minicts.espeak import require_espeak
from local.minicts.voices import draw_speaker
from local.minicts.write import write_corpus

HOURS, SPEAKERS, TEST_WORDS, SEED = (0.005, 1000.0), (2, 20000), (100, 100000), (0, 2**31 - 1)
_FIRST_TRAIN, _FIRST_DEV = 10001, 80001
_FIRST_TEST_SW, _FIRST_TEST_EN = 4390, 4156  # as in Hub5'00


def prepare(
    out: Path, *, hours: float, speakers: int, seed: int, jobs: int, test_words: int = 1500, version: int = VERSION
) -> None:
    """Writes the corpus into `out`: wav/, train/, dev/, test/, en.glm, lexicon.txt, nonspeech.txt, lm/, corpus.json.

    Args:
        out: output directory.
        hours: of training speech (utterances, not calls), reached to about 10 %. dev has 8 % of it, in addition.
        speakers: in the training set. dev and test have two new ones per conversation.
        seed: of the corpus.
        jobs: worker processes.
        test_words: in the test set, half in `sw_*` and half in `en_*` conversations.
        version: must be `conditions.VERSION`.

    Raises:
        InputError: a value is out of range, the version differs, or espeak-ng is not installed.
    """
    _check("corpus.hours", hours, HOURS)
    _check("corpus.speakers", speakers, SPEAKERS)
    _check("corpus.test_words", test_words, TEST_WORDS)
    _check("corpus.seed", seed, SEED)
    if version != VERSION:
        raise InputError(f"corpus.version={version}: this generator makes version {VERSION}; choose that")
    require_espeak()
    wavs = out / "wav"
    wavs.mkdir(parents=True, exist_ok=True)
    calls = plan(hours, speakers, seed, test_words)
    conversations = parallel_map(partial(hold, folder=wavs), calls, jobs, "synthesising conversations")
    write_corpus(out, conversations, dict(hours=hours, speakers=speakers, seed=seed, test_words=test_words))


def plan(hours: float, speakers: int, seed: int, test_words: int) -> list[Call]:
    """Returns the calls of all sets with their speakers and random streams.

    Training speakers take turns, so that all call about equally often. Both sides of a dev or test call are new
    speakers.
    """
    words = hours * 3600 * WORDS_PER_SECOND
    count = max(round(words / WORDS_PER_CONVERSATION), math.ceil(speakers / 2))
    pool = [draw_speaker(f"tr{n + 1:05d}", SW, np.random.default_rng((seed, 0, n))) for n in range(speakers)]
    pairs = _pairs(speakers, count, np.random.default_rng((seed, 1)))
    calls = [
        Call(f"sw_{_FIRST_TRAIN + n}", "train", SW, (pool[a], pool[b]), round(words / count), (seed, 2, n))
        for n, (a, b) in enumerate(pairs)
    ]
    dev_count = max(1, round(words * DEV_SHARE / WORDS_PER_CONVERSATION))
    calls += _strangers("dev", SW, _FIRST_DEV, dev_count, round(words * DEV_SHARE / dev_count), (seed, 3))
    test_count = max(1, round(test_words / 2 / WORDS_PER_TEST_CONVERSATION))
    for stream, condition, first in ((4, SW, _FIRST_TEST_SW), (5, EN, _FIRST_TEST_EN)):
        calls += _strangers("test", condition, first, test_count, round(test_words / 2 / test_count), (seed, stream))
    return calls


def _strangers(
    subset: str, condition: Condition, first: int, count: int, words: int, stream: tuple[int, int]
) -> list[Call]:
    """Returns `count` calls between people who are heard nowhere else."""
    calls = []
    for number in range(count):
        recording = f"{condition.name}_{first + number}"
        a, b = (
            draw_speaker(f"{recording}_{letter}", condition, np.random.default_rng((*stream, 0, number, side)))
            for side, letter in enumerate("AB")
        )
        calls.append(Call(recording, subset, condition, (a, b), words, (*stream, 1, number)))
    return calls


def _pairs(speakers: int, count: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Returns `count` pairs of different speakers, in rounds in which everybody calls once, in random order."""
    order: list[int] = []
    while len(order) < 2 * count:
        order += rng.permutation(speakers).tolist()
        if len(order) > speakers and speakers % 2 and order[-speakers] == order[-speakers - 1]:
            order[-speakers], order[-1] = order[-1], order[-speakers]  # avoids a self-call between two rounds
    return list(zip(order[0 : 2 * count : 2], order[1 : 2 * count : 2], strict=True))


def _check(name: str, value: float, limits: tuple[float, float]) -> None:
    whole = isinstance(limits[0], int)
    if not isinstance(value, int if whole else int | float) or not limits[0] <= value <= limits[1]:
        kind = "whole number" if whole else "number"
        raise InputError(f"{name}: {value} is not a {kind} from {limits[0]} to {limits[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the corpus minicts (synthetic telephone conversations).")
    parser.add_argument("--out", type=Path, required=True, help="directory to write, e.g. exp/minicts/data")
    parser.add_argument("--hours", type=float, default=1.0, help="of training speech")
    parser.add_argument("--speakers", type=int, default=40, help="in the training set")
    parser.add_argument("--test-words", type=int, default=1500, help="in the test set")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nj", type=int, default=2, help="processes")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        prepare(
            options.out,
            hours=options.hours,
            speakers=options.speakers,
            seed=options.seed,
            jobs=options.nj,
            test_words=options.test_words,
        )
    except InputError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
