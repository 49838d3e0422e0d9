"""Runs a stage: `python -m asr_am.stages NAME [override=value ...]`, the same as `python -m asr_am.stages.NAME`."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from asr_am.options import choices

STAGES = ("data", "lang", "features", "align", "speaker", "egs", "train", "decode", "rescore", "score", "report")


def main() -> None:
    """Runs the stage that the first argument names. Ends with status 1 if there is none of that name."""
    name = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if name in ("--help", "-h"):
        print(__doc__, f"Stages: {', '.join(STAGES)}. `... NAME --help` prints the options of one.", sep="\n\n")
        sys.exit(0)
    if name not in STAGES:
        print(f"ERROR stage {name or 'missing'}: there is no such stage{choices(name, STAGES)}", file=sys.stderr)
        sys.exit(1)
    sys.argv[0] = str(Path(__file__).with_name(f"{name}.py"))
    import_module(f"asr_am.stages.{name}").main()


if __name__ == "__main__":
    main()
