"""The stages of a recipe, one module each: `python -m asr_am.stages.<name>`."""

from __future__ import annotations

import sys
from types import TracebackType


def _print_unless_interrupted(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Prints one line for Ctrl-C during the imports of a stage. `app.ends_on_signals` handles it later."""
    if issubclass(kind, KeyboardInterrupt):
        print("ERROR interrupted; the same command continues", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


if sys.excepthook is sys.__excepthook__:
    sys.excepthook = _print_unless_interrupted
