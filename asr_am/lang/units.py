"""Units that a neural LM predicts: words or sentencepiece pieces, numbered by falling frequency.

Log-uniform sampling needs that order. As the lexicon is closed, later steps need only the table from words to units,
whichever kind they are.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from asr_am.errors import InputError

BOUNDARY, UNKNOWN = 0, 1  # ids of `</s>` (before and after a sentence) and `<unk>`
SPECIAL = ("</s>", "<unk>")
LINE_BYTES = 1 << 16  # sentencepiece ignores longer lines
MAX_PIECE_WORDS = 10_000_000  # the counts of a text with more words are scaled down to this many


@dataclass(frozen=True)
class Units:
    """Units of a neural LM.

    Attributes:
        names: name of each unit id.
        spelling: unit ids of each known word except `<unk>`. Every other word is UNKNOWN, and so is one that
            sentencepiece spells with no pieces.
    """

    names: Sequence[str]
    spelling: Mapping[str, tuple[int, ...]]

    def __len__(self) -> int:
        return len(self.names)

    def of(self, word: str) -> tuple[int, ...]:
        """Returns the unit ids of a word."""
        return self.spelling.get(word) or (UNKNOWN,)


def make_units(
    kind: Literal["word", "sentencepiece"], lexicon: Collection[str], counts: Counter[str], size: int
) -> Units:
    """Makes the units of all words of the lexicon, and with `sentencepiece` also of all words of the text.

    Args:
        size: number of pieces, including `<unk>` but not `</s>`.

    Raises:
        InputError: the kind is unknown, or the text does not give that number of pieces.
    """
    if kind not in ("word", "sentencepiece"):
        raise InputError(f"lm.units={kind}: must be word or sentencepiece")
    if kind == "word":
        return _numbered({word: (word,) for word in set(lexicon) - set(SPECIAL)}, counts, ())
    pieces, spell = _learn_pieces(counts, size)
    words = (set(lexicon) | counts.keys()) - set(SPECIAL)
    return _numbered({word: spell(word) for word in words}, counts, pieces)


def _numbered(spelling: Mapping[str, Sequence[str]], counts: Counter[str], names: Iterable[str]) -> Units:
    """Numbers units by frequency. `names` are units to include even if no word uses them."""
    frequency: Counter[str] = Counter(dict.fromkeys(names, 0))
    for word, units in spelling.items():
        for unit in units:
            frequency[unit] += counts[word]
    ordered = [*SPECIAL, *sorted(frequency.keys() - set(SPECIAL), key=lambda name: (-frequency[name], name))]
    ids = {name: number for number, name in enumerate(ordered)}
    return Units(ordered, {word: tuple(ids[unit] for unit in spelling[word]) for word in sorted(spelling)})


def _learn_pieces(counts: Counter[str], size: int) -> tuple[list[str], Callable[[str], Sequence[str]]]:
    """Returns the names of the pieces, and a function from a word to its pieces (unigram model, the default)."""
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_repeated(counts), model_writer=model, vocab_size=size, character_coverage=1.0,
            max_sentence_length=LINE_BYTES, normalization_rule_name="identity", num_threads=1, unk_id=0, bos_id=-1,
            eos_id=-1, minloglevel=2,
        )  # fmt: skip
    except (RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0].rsplit("] ", 1)[-1]
        raise InputError(
            f"lm.pieces={size}: sentencepiece cannot learn that many ({reason}); choose another number"
        ) from error
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    names = [processor.id_to_piece(number) for number in range(processor.get_piece_size())]
    return names, lambda word: [names[number] for number in processor.encode(word)]


def _repeated(counts: Counter[str]) -> Iterator[str]:
    """Yields every word as often as it occurs in the text. Lines repeat one word, as pieces never cross words."""
    share = min(1.0, MAX_PIECE_WORDS / max(1, counts.total()))
    for word, count in sorted(counts.items()):
        left = max(1, round(count * share)) if word not in SPECIAL else 0
        per_line = max(1, min(100, LINE_BYTES // (len(word.encode()) + 1)))
        while left > 0:
            yield " ".join([word] * min(left, per_line))
            left -= per_line
