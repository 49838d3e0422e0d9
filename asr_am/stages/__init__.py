"""The stages of a recipe, one module each: `python -m asr_am.stages.<name>`.

`python -m` imports this package before the module. So what a stage does about signals begins here, and not after
seconds of imports. `app.ends_on_signals` takes over while the stage works.
"""

from __future__ import annotations

import os
import signal
import sys
from types import TracebackType

from asr_am.signals import signal_on_parent_death

# Before numpy is imported, which reads it then. Jobs of a stage share the cores, so several threads in each are slower
# than one. Training sets its own number.
os.environ.setdefault("OMP_NUM_THREADS", "1")

PREEMPTION = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that ask for an early end. Training saves a checkpoint first (`distributed.runtime.preemption`)."""


def _print_unless_interrupted(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Prints one line for Ctrl-C during the imports of a stage."""
    if issubclass(kind, KeyboardInterrupt):
        print("ERROR interrupted; the same command continues", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


def terminate_at_once(*_: object) -> None:
    """Ends the process with one line and exit status 143. For the time before and after the work of a stage."""
    os.write(2, b"ERROR terminated; the same command continues\n")
    os._exit(128 + signal.SIGTERM)


def preempt_at_once(*_: object) -> None:
    """Ends the process with one line and exit status 75, as there is no checkpoint to save."""
    os.write(2, b"ERROR asked to end by a signal; the same command continues\n")
    os._exit(os.EX_TEMPFAIL)


def started_by_recipe() -> bool:
    """Returns True in a stage that scripts/recipe.sh has started."""
    return os.environ.get("ASR_AM_RECIPE") == str(os.getppid())


def end_with_recipe() -> None:
    """Sends this process SIGTERM when the recipe that has started it ends, or has ended: bash does not pass it on."""
    if started_by_recipe():
        signal_on_parent_death(signal.SIGTERM)
    if recipe := os.environ.get("ASR_AM_RECIPE"):
        try:
            os.kill(int(recipe), 0)
            ended = os.getppid() == 1 and recipe != "1"  # the recipe may be there as a zombie
        except ProcessLookupError:
            ended = True
        if ended:
            terminate_at_once()


if sys.excepthook is sys.__excepthook__:
    sys.excepthook = _print_unless_interrupted
if sys.argv[:1] == ["-m"]:  # `python -m` has not found its module yet
    signal.signal(signal.SIGTERM, terminate_at_once)
    for _number in PREEMPTION:
        signal.signal(_number, preempt_at_once)
    end_with_recipe()
