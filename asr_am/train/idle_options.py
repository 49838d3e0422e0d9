"""Warns of options that cannot act in a training as short as this one."""

from __future__ import annotations

import logging
import math

from asr_am.distributed.strategy import Strategy
from asr_am.train.train_options import TrainOptions

log = logging.getLogger(__name__)


def warn_of_idle_options(options: TrainOptions, strategy: Strategy, batches: int, learners: int) -> None:
    """Logs a warning for each option of the strategy and the schedule that cannot act.

    Args:
        options: options of the training.
        strategy: the strategy of any learner.
        batches: batches of an epoch, of all learners.
        learners: number of learners.
    """
    steps = math.ceil(batches / learners)
    for warning in (
        *strategy.idle_options(steps, options.epochs),
        *options.schedule.idle_options(steps, options.epochs),
    ):
        log.warning("%s", warning)
