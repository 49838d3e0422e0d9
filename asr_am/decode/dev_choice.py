"""The LM weight and insertion penalty with the fewest errors on dev, counted as stage score counts those of test."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from asr_am.data.textfile import numbered_lines, write_lines
from asr_am.decode.ctm import ctm_name
from asr_am.decode.lattice import LmScale
from asr_am.errors import InputError
from asr_am.parallel import parallel_map
from asr_am.score.scoring import Reference

FILE = "best_on_dev.json"


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
        """Reads the choice of a decoding or rescoring run.

        Raises:
            InputError: the file is missing or malformed.
        """
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
        data_dir: output of stage data.
        subset: name of the set.
        subsets: rules of the subsets that are scored apart, see `Reference`.
    """
    glm, lexicon = data_dir / "en.glm", data_dir / "lexicon.txt"
    stm = data_dir / subset / "ref.stm"
    if glm.exists() or not lexicon.exists():
        return Reference(stm, glm if glm.exists() else None, subsets or {})
    lines = numbered_lines(lexicon)
    words = {line.split(maxsplit=1)[0].encode() for _, line in lines if line.strip()}
    return Reference(stm, None, subsets or {}, case_sensitive=len({word.lower() for word in words}) < len(words))


def choose_on_dev(reference: Reference, run: Path, dev: str, grid: Sequence[LmScale], jobs: int) -> DevChoice:
    """Scores the words of dev under each LM scale.

    Args:
        reference: reference of dev.
        run: folder of the decoding or rescoring run, with the CTM files of dev.
        dev: name of the set.
        grid: the LM scales.
        jobs: parallel jobs.

    Returns:
        The LM scale with the fewest errors.
    """
    ctms = [run / "ctm" / ctm_name(dev, scale) for scale in grid]
    totals = parallel_map(partial(_count_errors, reference), ctms, jobs, f"scoring {run.stem} on {dev}")
    best = choose(grid, [errors for errors, _ in totals])
    return DevChoice(*grid[best], *totals[best])


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
