"""A virtual cluster: learners are tasks of one process that compute real gradients in modelled time.

scheduler     virtual clock, tasks, conditions, locks and events, and torch's state of each task
network       end times of transfers
collectives   collectives of the team and of groups, and computing beside them
messaging     point-to-point messages
control       connections of the supervisor, which is that of real processes
sim_learner   state of one learner
team          one learner's `Team`
cluster       a run: starts and ends the processes that the supervisor wants
epoch_timing  duration of an epoch, without a model
"""

from asr_am.distributed.simulator.cluster import SimCluster
from asr_am.distributed.simulator.team import SimTeam

__all__ = ["SimCluster", "SimTeam"]
