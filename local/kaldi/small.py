"""Chooses GMMs and features by the size of the corpus: `python -m local.kaldi.small OVERRIDE...` prints overrides.

LDA, MLLT and fMLLR need more speech than triphones. Below `corpus.adapted_hours` (conf/sizes.yaml) the network is
trained on alignments of plain triphones, unless the user has chosen systems or features.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

from asr_am.errors import InputError
from asr_am.stages.recipe_files import CONF
from asr_am.stages.resolvers import hours_of

UNADAPTED = ("align=triphone", "features=logmel")
CHOSEN = ("align", "features", "speaker", "systems", "experiment", "mmi")  # groups that only fit some systems


def overrides_by_size(given: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """Returns further overrides and a line that says why, or nothing.

    Args:
        given: overrides of the command, for Hydra.
    """
    values = {name.lstrip("+~"): value.strip("'\"") for name, _, value in (text.partition("=") for text in given)}
    if any(name.split(".")[0] in CHOSEN for name in values):
        return (), ""
    corpus = values.get("corpus.name", "")
    hours = hours_of(str(Path(values.get("exp", "exp")) / corpus / "data"))
    least = _number(values.get("corpus.adapted_hours", OmegaConf.load(CONF / "sizes.yaml").corpus.adapted_hours))
    if not 0 < hours < least:
        return (), ""
    why = (
        f"{corpus}: {60 * hours:.1f} minutes of training speech are too few for speaker adaptation, which needs "
        f"{60 * least:g}: {' '.join(UNADAPTED)} (align=sat features=fmllr to try it all the same)"
    )
    return UNADAPTED, why


def _number(value: object) -> float:
    try:
        return float(str(value))
    except ValueError as error:
        raise InputError(f"corpus.adapted_hours={value}: must be a number of hours") from error


if __name__ == "__main__":
    try:
        overrides, why = overrides_by_size(sys.argv[1:])
    except InputError as error:
        sys.exit(f"ERROR recipe: {error}")
    for line in overrides:
        print(line)
    if why:
        print(f"  {why}", file=sys.stderr)
