"""The LM weight and insertion penalty with the fewest errors on dev, scored as stage score scores test."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from asr_am.errors import InputError

if TYPE_CHECKING:
    from asr_am.decode.lattice import LmScale
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
        from asr_am.decode.lattice import LmScale

        return LmScale(self.lm, self.insertion)

    @classmethod
    def load(cls, words: Path) -> DevChoice:
        """Reads what `choose_on_dev` has chosen in a decoding or rescoring run.

        Raises:
            InputError: the file is missing or malformed.
        """
        path = words / FILE
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            return cls(float(value["lm"]), float(value["insertion"]), int(value["errors"]), int(value["words"]))
        except (OSError, ValueError, OverflowError, KeyError, TypeError) as error:
            stage = "8 (rescore)" if words.parent.name == "rescore" else "7 (decode)"
            raise InputError(f"{path}: missing or damaged ({error}); remove {words}, and run stage {stage}") from error


def choose_on_dev(data_dir: Path, words: Path, grid: Sequence[LmScale], jobs: int) -> LmScale:
    """Scores the words of dev under each LM scale, and writes the best into the run's folder.

    Args:
        data_dir: output of stage data.
        words: folder of the decoding or rescoring run, with the CTM files of dev.
        grid: the LM scales.
        jobs: parallel jobs.

    Returns:
        The LM scale with the fewest errors.
    """
    from asr_am.data.textfile import write_lines
    from asr_am.decode.decode_set import choose, ctm_name
    from asr_am.parallel import parallel_map
    from asr_am.score.scoring import Reference

    dev = Reference(data_dir / "dev/ref.stm", glm_rules(data_dir), {}, case_sensitive=case_matters(data_dir))
    ctms = [words / "ctm" / ctm_name("dev", scale) for scale in grid]
    totals = parallel_map(partial(_count_errors, dev), ctms, jobs, f"scoring {words.stem} on dev")
    best = choose(grid, [errors for errors, _ in totals])
    write_lines(words / FILE, [json.dumps(asdict(DevChoice(*grid[best], *totals[best])))])
    return grid[best]


def glm_rules(data_dir: Path) -> Path | None:
    """Returns the GLM of a corpus, None if it has none."""
    glm = data_dir / "en.glm"
    return glm if glm.exists() else None


def case_matters(data_dir: Path) -> bool:
    """True if the lexicon has words that differ only in case, as NIST's programs fold it, and no GLM makes them one."""
    from asr_am.data.textfile import numbered_lines

    lexicon = data_dir / "lexicon.txt"
    if glm_rules(data_dir) is not None or not lexicon.exists():
        return False
    words = {line.split(maxsplit=1)[0].encode() for _, line in numbered_lines(lexicon) if line.strip()}
    return len({word.lower() for word in words}) < len(words)


def _count_errors(reference: Reference, ctm: Path) -> tuple[int, int]:
    total = reference.score(ctm).total
    return total.errors, total.words
