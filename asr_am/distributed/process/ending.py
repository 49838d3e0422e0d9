"""The end of a learner's process."""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn


def end_process(status: int = 0) -> NoReturn:
    """End this process at once; call it when the team is closed.

    Threads that torch.distributed leaves behind may meet an interpreter that is shutting down, and then abort the
    process ("terminate called without an active exception"): a learner that has finished would count as dead.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
