"""Parallax (Kim et al., 2018): trains a single-device program with sparse parameters on many devices.

    with parallax.get_runner(model, loss, optimizer, team, parallax.Config(clip_norm=1.0)) as runner:
        for batch in parallax.shard(batches, team):
            runner.run(batch)

README.md in this folder describes the method and lists the modules in reading order.
"""

from asr_am.parallax.config import Config
from asr_am.parallax.runner import Runner, get_runner, shard

__all__ = ["Config", "Runner", "get_runner", "shard"]
