"""The LM scale with the fewest errors on dev: chosen, kept, and read again."""

from __future__ import annotations

from pathlib import Path

import pytest

from asr_am.decode.dev_choice import FILE, DevChoice, choose_on_dev, read_reference
from asr_am.decode.lattice import LmScale
from asr_am.errors import InputError

GRID = [LmScale(8.0, 0.0), LmScale(12.0, 0.0), LmScale(12.0, 0.5)]
WORDS = ["one two", "one two three", "two"]  # under each LM scale. The transcript is `one two three`.


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Returns exp/<corpus> with a transcript of dev, and a decoding run with its words under each scale."""
    (tmp_path / "data/dev").mkdir(parents=True)
    (tmp_path / "data/dev/ref.stm").write_text("call 1 anna 0.0 3.0 <O> one two three\n")
    run = tmp_path / "decode/sat_kn3"
    (run / "ctm").mkdir(parents=True)
    for scale, words in zip(GRID, WORDS, strict=True):
        lines = [f"call 1 {0.5 * n:.2f} 0.40 {word} 1.0\n" for n, word in enumerate(words.split())]
        (run / f"ctm/dev_{scale.lm:g}_{scale.insertion:g}.ctm").write_text("".join(lines))
    return run


def test_the_scale_with_the_fewest_errors_is_kept(run: Path) -> None:
    choice = choose_on_dev(read_reference(run.parents[1] / "data", "dev"), run, "dev", GRID, 1)
    assert (choice.scale, choice.errors, choice.words) == (GRID[1], 0, 3)
    choice.save(run)
    assert DevChoice.load(run) == choice


@pytest.mark.parametrize(("lexicon", "errors"), [("one W\ntwo T\n", 0), ("one W\nTWO T\ntwo D\n", 1)])
def test_case_matters_if_words_of_the_lexicon_differ_only_in_it(run: Path, lexicon: str, errors: int) -> None:
    data = run.parents[1] / "data"
    (data / "lexicon.txt").write_text(lexicon)
    (data / "dev/ref.stm").write_text("call 1 anna 0.0 3.0 <O> one TWO three\n")
    assert choose_on_dev(read_reference(data, "dev"), run, "dev", GRID, 1).errors == errors


def test_the_glm_of_the_corpus_counts(run: Path) -> None:
    (run.parents[1] / "data/en.glm").write_text(";; a GLM\n[TWO] => [TWO WORDS] / [ ] __ [ ]\n")
    assert choose_on_dev(read_reference(run.parents[1] / "data", "dev"), run, "dev", GRID, 1).words == 4


@pytest.mark.parametrize(
    "content",
    [
        None, "{", "[]", '{"lm": 8}', '{"lm": "a", "insertion": 0, "errors": 1, "words": 1}',
        '{"lm": 8, "insertion": 0, "errors": Infinity, "words": 1}',
    ],
)  # fmt: skip
def test_a_choice_that_cannot_be_read(run: Path, content: str | None) -> None:
    if content is not None:
        (run / FILE).write_text(content)
    with pytest.raises(InputError, match=r"sat_kn3/best_on_dev.json: .*stage 7 \(decode\)"):
        DevChoice.load(run)
