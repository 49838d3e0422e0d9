"""Parallax (Kim et al., 2018): a training program for one device, run on many, for models with sparse parameters.

    with parallax.get_runner(model, loss, optimizer, team, parallax.Config(clip_norm=1.0)) as runner:
        for batch in parallax.shard(batches, team):
            runner.run(batch)

dry, plan      which parameters are sparse, which way each goes   lookup   what stands in the model for a sparse one
split, runner  the model in parts; a step                         rows     numbers and values, merged, on the wire
server, worker, letters, desk   sparse parameters on servers      rule     torch's optimizers on some rows
replicated     sparse parameters by all-gather or all-reduce      shard    the input, split
"""

from asr_am.parallax.config import Config
from asr_am.parallax.runner import Runner, get_runner, shard

__all__ = ["Config", "Runner", "get_runner", "shard"]
