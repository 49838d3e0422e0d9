"""The virtual cluster: learners as tasks of one process, real arithmetic, modelled time.

scheduler    the clock, tasks, and what they wait for         torch_state  what torch keeps per thread, per task
network      when transfers end                               member       what all parts know of a learner
collectives  of the team and groups; computing beside them    group        one member's end of them: the `Group`
mail         letters                                          control      leases and meetings
team         one learner's end: the `Team`
cluster      a run: learners start, crash, start anew         epoch        how long an epoch takes, without a model
"""

from asr_am.distributed.simulator.cluster import SimCluster
from asr_am.distributed.simulator.team import SimTeam

__all__ = ["SimCluster", "SimTeam"]
