"""The LM weight and insertion penalty with the fewest errors on dev, counted as stage score counts those of test."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from asr_am.data.textfile import numbered_lines, write_lines
from asr_am.decode.ctm import ctm_name
from asr_am.decode.lattice import LmScale
from asr_am.errors import InputError
from asr_am.parallel import parallel_map
from asr_am.score.scoring import Reference

log = logging.getLogger(__name__)

FILE = "best_on_dev.json"
ADDED, ROUNDS = 3, 6  # values beyond the edge of a grid that are tried at once, and how often


@dataclass(frozen=True)
class DevChoice:
    """An LM scale, and the errors and words of dev under it."""

    lm: float
    insertion: float
    errors: int
    words: int

    @property
    def scale(self) -> LmScale:
        """The LM scale."""
        return LmScale(self.lm, self.insertion)

    def save(self, run: Path) -> None:
        """Writes the choice into the folder of a decoding or rescoring run."""
        write_lines(run / FILE, [json.dumps(asdict(self))])

    @classmethod
    def load(cls, run: Path) -> DevChoice:
        """Reads the choice of a decoding or rescoring run. Raises InputError if the file is missing or malformed."""
        path = run / FILE
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            return cls(float(value["lm"]), float(value["insertion"]), int(value["errors"]), int(value["words"]))
        except (OSError, ValueError, OverflowError, KeyError, TypeError) as error:
            stage = "8 (rescore)" if run.parent.name == "rescore" else "7 (decode)"
            raise InputError(f"{path}: missing or damaged ({error}); remove {run}, and run stage {stage}") from error


def read_reference(data_dir: Path, subset: str, subsets: Mapping[str, str] | None = None) -> Reference:
    """Reads the reference of a set with the GLM of the corpus, if it has one.

    Without a GLM, which folds case, case matters if the lexicon has words that differ in nothing else.

    Args:
        subsets: rules of the subsets that are scored apart, see `Reference`.
    """
    glm, lexicon = data_dir / "en.glm", data_dir / "lexicon.txt"
    stm = data_dir / subset / "ref.stm"
    if glm.exists() or not lexicon.exists():
        return Reference(stm, glm if glm.exists() else None, subsets or {})
    lines = numbered_lines(lexicon)
    words = {line.split(maxsplit=1)[0].encode() for _, line in lines if line.strip()}
    return Reference(stm, None, subsets or {}, case_sensitive=len({word.lower() for word in words}) < len(words))


def choose_on_dev(
    reference: Reference, run: Path, dev: str, grid: Sequence[LmScale], jobs: int,
    write_more: Callable[[Sequence[LmScale]], None],
) -> DevChoice:  # fmt: skip
    """Scores the words of dev under each LM scale, and under further ones while the best is at the edge of the grid.

    Args:
        run: folder of the decoding or rescoring run, with the CTM files of dev.
        write_more: writes the CTM files of dev under further LM scales into the folder.

    Returns:
        The LM scale with the fewest errors.
    """
    totals = _score_all(reference, run, dev, grid, jobs)
    best = _best(totals)
    for _ in range(ROUNDS):
        if not (added := beyond(totals, best)):
            break
        write_more(added)
        totals |= _score_all(reference, run, dev, added, jobs)
        best = _best(totals)
    if len(totals) > len(grid):
        log.info(
            "%s: the best of the grid was at its edge, so %d more pairs of LM weight and insertion penalty were tried: "
            "now %g and %g are best", run.name, len(totals) - len(grid), *best,
        )  # fmt: skip
    return DevChoice(*best, *totals[best])


def beyond(grid: Iterable[LmScale], best: LmScale) -> list[LmScale]:
    """Returns the LM scales to add to a grid whose first or last LM weight or penalty is best.

    A grid with a single LM weight, or a single penalty, keeps it.
    """
    lms, penalties = (sorted(set(values)) for values in zip(*grid, strict=True))
    more_lms = [lm for lm in _steps_beyond(lms, best.lm) if lm > 0]
    more_penalties = _steps_beyond(penalties, best.insertion)
    added = [*itertools.product(more_lms, penalties), *itertools.product(lms + more_lms, more_penalties)]
    return [LmScale(*scale) for scale in added]


def _steps_beyond(values: Sequence[float], best: float) -> list[float]:
    """Returns values beyond the first or last of some ascending ones if that is the best, in equal steps."""
    for edge, neighbour in (values[:2], values[:-3:-1]) if len(values) > 1 else ():
        if best == edge:
            return [edge + n * (edge - neighbour) for n in range(1, ADDED + 1)]
    return []


def _score_all(
    reference: Reference, run: Path, dev: str, scales: Sequence[LmScale], jobs: int
) -> dict[LmScale, tuple[int, int]]:
    """Returns errors and words of dev under each LM scale."""
    ctms = [run / "ctm" / ctm_name(dev, scale) for scale in scales]
    totals = parallel_map(partial(_count_errors, reference), ctms, jobs, f"scoring {run.stem} on {dev}")
    return dict(zip(scales, totals, strict=True))


def _best(totals: Mapping[LmScale, tuple[int, int]]) -> LmScale:
    scales = list(totals)
    return scales[choose(scales, [errors for errors, _ in totals.values()])]


def choose(grid: Sequence[LmScale], errors: Sequence[int]) -> int:
    """Returns the index of the LM scale with the fewest errors.

    Ties go to the insertion penalty closest to 0, then to the middle LM weight, which is the least sensitive.
    """
    fewest = [k for k, count in enumerate(errors) if count == min(errors)]
    smallest = min(abs(grid[k].insertion) for k in fewest)
    candidates = sorted((k for k in fewest if abs(grid[k].insertion) == smallest), key=lambda k: grid[k].lm)
    return candidates[(len(candidates) - 1) // 2]


def _count_errors(reference: Reference, ctm: Path) -> tuple[int, int]:
    total = reference.score(ctm).total
    return total.errors, total.words
