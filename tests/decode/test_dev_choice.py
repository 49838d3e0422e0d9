"""The LM scale with the fewest errors on dev: chosen, kept, and read again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from asr_am.decode.dev_choice import FILE, ROUNDS, DevChoice, beyond, choose_on_dev, read_reference
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
        write_ctm(run, scale, words)
    return run


def write_ctm(run: Path, scale: LmScale, words: str) -> None:
    lines = [f"call 1 {0.5 * n:.2f} 0.40 {word} 1.0\n" for n, word in enumerate(words.split())]
    (run / f"ctm/dev_{scale.lm:g}_{scale.insertion:g}.ctm").write_text("".join(lines))


def choice(run: Path) -> DevChoice:
    """Returns the choice from GRID, whose best scale has the highest LM weight. Further ones make an error more."""

    def write_more(scales: Sequence[LmScale]) -> None:
        for scale in scales:
            write_ctm(run, scale, "one")

    return choose_on_dev(read_reference(run.parents[1] / "data", "dev"), run, "dev", GRID, 1, write_more)


def test_the_scale_with_the_fewest_errors_is_kept(run: Path) -> None:
    found = choice(run)
    assert (found.scale, found.errors, found.words) == (GRID[1], 0, 3)
    found.save(run)
    assert DevChoice.load(run) == found


@pytest.mark.parametrize(("lexicon", "errors"), [("one W\ntwo T\n", 0), ("one W\nTWO T\ntwo D\n", 1)])
def test_case_matters_if_words_of_the_lexicon_differ_only_in_it(run: Path, lexicon: str, errors: int) -> None:
    data = run.parents[1] / "data"
    (data / "lexicon.txt").write_text(lexicon)
    (data / "dev/ref.stm").write_text("call 1 anna 0.0 3.0 <O> one TWO three\n")
    assert choice(run).errors == errors


def test_the_glm_of_the_corpus_counts(run: Path) -> None:
    (run.parents[1] / "data/en.glm").write_text(";; a GLM\n[TWO] => [TWO WORDS] / [ ] __ [ ]\n")
    assert choice(run).words == 4


@pytest.mark.parametrize(
    ("best", "lm_weights", "penalties"),
    [
        ((5, 0.0), [2, 5, 8, 10], [0.0, 0.5]), ((10, 0.0), [5, 8, 10, 12, 14, 16], [0.0, 0.5]),
        ((8, 0.0), [5, 8, 10], [-1.5, -1.0, -0.5, 0.0, 0.5]), ((8, 0.5), [5, 8, 10], [0.0, 0.5, 1.0, 1.5, 2.0]),
    ],
)  # fmt: skip
def test_a_grid_grows_where_its_edge_is_best(
    best: tuple[float, float], lm_weights: list[float], penalties: list[float]
) -> None:
    """In the steps of the edge, as far as LM weights are above 0."""
    grid = [LmScale(lm, penalty) for lm in (5, 8, 10) for penalty in (0.0, 0.5)]
    added = beyond(grid, LmScale(*best))
    assert set(added).isdisjoint(grid)
    either = {0.0} if len(penalties) == 2 else set()  # penalties 0 and 0.5 are both an edge
    both = {LmScale(lm, penalty) for lm in lm_weights for penalty in penalties}
    assert both <= {*grid, *added} if either else both == {*grid, *added}


def test_a_single_value_is_kept() -> None:
    grid = [LmScale(lm, 0.5) for lm in (5.0, 8.0, 10.0)]
    assert beyond(grid, grid[1]) == []
    assert beyond(grid, grid[2]) == [LmScale(12.0, 0.5), LmScale(14.0, 0.5), LmScale(16.0, 0.5)]
    assert beyond([LmScale(12.0)], LmScale(12.0)) == []


def test_a_better_scale_beyond_the_grid_is_found_and_said(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Errors fall until an LM weight of 24, and then rise."""
    asked = []

    def write_more(scales: Sequence[LmScale]) -> None:
        asked.append(scales)
        for scale in scales:
            write_ctm(run, scale, "one two three" if scale.lm == 24 else "one two" if scale.lm < 30 else "one")

    grid = [LmScale(8.0), LmScale(12.0)]
    write_ctm(run, grid[0], "one")
    write_ctm(run, grid[1], "one two")
    reference = read_reference(run.parents[1] / "data", "dev")
    with caplog.at_level("INFO"):
        found = choose_on_dev(reference, run, "dev", grid, 1, write_more)
    assert (found.scale, found.errors) == (LmScale(24.0), 0)
    assert [[scale.lm for scale in scales] for scales in asked] == [[16, 20, 24], [28, 32, 36]]
    (line,) = [record.getMessage() for record in caplog.records if "edge" in record.getMessage()]
    assert line.startswith("sat_kn3: ") and "6 more pairs" in line and line.endswith("now 24 and 0 are best")


def test_a_grid_does_not_grow_without_end(run: Path) -> None:
    """With words that no scale changes but the last."""
    rounds = []

    def write_more(scales: Sequence[LmScale]) -> None:
        rounds.append(scales)
        for scale in scales:
            write_ctm(run, scale, "one two " + "three " * (len(rounds) + 1) if scale == scales[-1] else "")

    grid = [LmScale(8.0), LmScale(12.0)]
    (run.parents[1] / "data/dev/ref.stm").write_text("call 1 anna 0.0 3.0 <O> one two" + " three" * 20 + "\n")
    found = choose_on_dev(read_reference(run.parents[1] / "data", "dev"), run, "dev", grid, 1, write_more)
    assert len(rounds) == ROUNDS and found.scale == rounds[-1][-1]


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
