"""What a neural language model predicts: words, or pieces of them (sentencepiece), numbered by falling frequency.

The numbering is what log-uniform sampling wants. The lexicon is closed, so a table from words to their units is all
that is needed later, whichever kind they are.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from asr_am.errors import InputError

BOUNDARY, UNKNOWN = 0, 1  # ids of `</s>`, which stands before and after a sentence, and of `<unk>`
SPECIAL = ("</s>", "<unk>")
LINE_BYTES = 1 << 16  # sentencepiece leaves longer ones out
MAX_PIECE_WORDS = 10_000_000  # words; counts of a larger text are scaled down before pieces are learned from them


@dataclass(frozen=True)
class Units:
    """names: of the ids. spelling: the units of each known word, `<unk>` left out; every other word is UNKNOWN."""

    names: Sequence[str]
    spelling: Mapping[str, tuple[int, ...]]

    def __len__(self) -> int:
        return len(self.names)

    def of(self, word: str) -> tuple[int, ...]:
        """The ids of one word."""
        return self.spelling.get(word, (UNKNOWN,))


def make_units(
    kind: Literal["word", "sentencepiece"], lexicon: Collection[str], counts: Counter[str], size: int
) -> Units:
    """The units of all words of the lexicon, and with `sentencepiece` of all words of the text.

    counts: of the text's words. size: how many pieces, `<unk>` among them, `</s>` not.
    InputError: an unknown kind, or a number of pieces that the text does not give.
    """
    if kind not in ("word", "sentencepiece"):
        raise InputError(f"lm.units={kind}: is word or sentencepiece")
    if kind == "word":
        return _numbered({word: (word,) for word in set(lexicon) - set(SPECIAL)}, counts, ())
    pieces, spell = _learn_pieces(counts, size)
    words = (set(lexicon) | counts.keys()) - set(SPECIAL)
    return _numbered({word: spell(word) for word in words}, counts, pieces)


def _numbered(spelling: Mapping[str, Sequence[str]], counts: Counter[str], names: Iterable[str]) -> Units:
    """Units with ids in the order of their frequency. names: those that there are beside the ones in use."""
    frequency: Counter[str] = Counter(dict.fromkeys(names, 0))
    for word, units in spelling.items():
        for unit in units:
            frequency[unit] += counts[word]
    ordered = [*SPECIAL, *sorted(frequency.keys() - set(SPECIAL), key=lambda name: (-frequency[name], name))]
    ids = {name: number for number, name in enumerate(ordered)}
    return Units(ordered, {word: tuple(ids[unit] for unit in spelling[word]) for word in sorted(spelling)})


def _learn_pieces(counts: Counter[str], size: int) -> tuple[list[str], Callable[[str], Sequence[str]]]:
    """The names of the pieces, and a function from a word to its pieces (those of the unigram model, the default)."""
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
        raise InputError(f"lm.pieces={size}: sentencepiece refuses ({reason}); choose another number") from error
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    names = [processor.id_to_piece(number) for number in range(processor.get_piece_size())]
    return names, lambda word: [names[number] for number in processor.encode(word)]


def _repeated(counts: Counter[str]) -> Iterator[str]:
    """Every word as often as the text has it, in lines of one word: pieces never cross words."""
    share = min(1.0, MAX_PIECE_WORDS / max(1, counts.total()))
    for word, count in sorted(counts.items()):
        left = max(1, round(count * share)) if word not in SPECIAL else 0
        per_line = max(1, min(100, LINE_BYTES // (len(word.encode()) + 1)))
        while left > 0:
            yield " ".join([word] * min(left, per_line))
            left -= per_line
