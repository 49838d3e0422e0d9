from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from asr_am.distributed.cluster_config import Workload
from asr_am.distributed.flat_params import BucketHook
from asr_am.distributed.leases import StepResult
from asr_am.distributed.simulator import SimTeam
from asr_am.distributed.simulator.epoch_timing import time_epoch
from asr_am.distributed.strategies.powersgd import Powersgd
from tests.support.round_cluster import cluster_of, run, segment, step_result
from tests.support.toy_training import hardware


def batch_of(frames: float, on_bucket: BucketHook | None) -> StepResult:
    return step_result(frames=frames)


def test_a_batch_takes_its_share_of_the_largest_batchs_time() -> None:
    def main(team: SimTeam) -> list[float]:
        team.leases(segment(4), synchronous=True)  # its batches have 10 frames
        ends = []
        for frames in (10.0, 5.0, 0.0):
            result = team.timed(partial(batch_of, frames))(None)
            assert result is not None and result.num_frames == frames
            ends.append(team.now())
        assert team.timed(lambda on_bucket: None)(None) is None
        return [*ends, team.now()]

    cluster = cluster_of(2, faults={"slow": {1: 10.0}})
    assert cluster.run(main) == {0: [3.0, 4.5, 4.5, 4.5], 1: [30.0, 45.0, 45.0, 45.0]}
    assert [comm_stats.faults for comm_stats in cluster.comm_stats] == [{}, {"slow": 2}]
    assert [comm_stats.waiting_seconds for comm_stats in cluster.comm_stats] == [0.0, 0.0]
    by_speed = Workload("self", frames_per_second={"abacus": 20.0})
    assert run(main, 1, workload=by_speed) == {0: [0.5, 0.75, 0.75, 0.75]}


def gradient_in_three_buckets(on_bucket: BucketHook | None) -> StepResult:
    """Returns a gradient of 6 elements in buckets of 2, announced in an order that autograd might choose."""
    if on_bucket is not None:
        for begin in (2, 4, 0):
            on_bucket(begin, begin + 2)
    return step_result()


def test_buckets_are_ready_in_the_backward_pass() -> None:
    """Forward: a third of 3 s. Backward: the last bucket after a third of it, the first at its end."""

    def main(team: SimTeam) -> list[tuple[int, int, float]]:
        told: list[tuple[int, int, float]] = []
        team.timed(gradient_in_three_buckets)(lambda begin, end: told.append((begin, end, round(team.now(), 9))))
        assert team.now() == 3.0
        return told

    times = [(4, 6, round(1 + 2 / 3, 9)), (2, 4, round(1 + 4 / 3, 9)), (0, 2, 3.0)]
    assert run(main, 2) == {0: times, 1: times}


def test_computing_is_slower_while_a_collective_is_transferred() -> None:
    """4 learners reduce 10 elements in 6 s, from 1 s on. At half speed 3 s of computing take longer."""

    def main(team: SimTeam) -> float:
        def reduce() -> None:
            team.sleep(1.0)
            team.start_all_reduce_mean(torch.zeros(10)).wait()

        begin = [0.0, 0.5, 6.75, 8.0][team.rank]
        team.spawn(reduce, "reduce")
        team.sleep(begin)
        team.timed(lambda on_bucket: step_result())(None)
        end = team.now()
        team.sleep(20.0 - end)
        return end - begin

    # 0: 1 s alone, the rest at half speed; 1: half a second alone; 2: 0.25 s at half speed, the rest alone; 3: alone
    assert run(main, nic_latency=0.0) == {0: 1.0 + 4.0, 1: 0.5 + 5.0, 2: 0.25 + 2.875, 3: 3.0}


def test_overlap_slows_to_the_end_of_the_last_of_several_transfers() -> None:
    def main(team: SimTeam) -> float:
        works = [team.start_all_reduce_mean(torch.zeros(1)) for _ in range(2)]  # 1.5 * 4 / 10 s each
        team.timed(lambda on_bucket: step_result())(None)
        end = team.now()
        for work in works:
            work.wait()
        return round(end, 9)

    ends = set(run(main, nic_latency=0.0).values())
    assert ends == {round(3.0 + 0.6, 9)}  # 1.2 s at half speed do 0.6 s of the work


def test_jitter_has_mean_one_and_its_own_stream_per_learner() -> None:
    def main(team: SimTeam) -> list[float]:
        ends = [0.0]
        for _ in range(4000):
            team.timed(lambda on_bucket: step_result())(None)
            ends.append(team.now())
        return (np.diff(ends) / 3.0).tolist()

    a, b = run(main, 2, jitter=0.5).values()
    for factors in (a, b):
        assert abs(np.mean(factors) - 1.0) < 0.03  # the standard error is 0.0084
        assert abs(np.std(np.log(factors)) - 0.5) < 0.02
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.06


def test_costs_are_queued_where_the_hardware_is_shared() -> None:
    def main(team: SimTeam) -> tuple[float, float]:
        team.simulate_cost("update", 20)  # 80 bytes at 40 bytes/s on each device
        updated = team.now()
        team.simulate_cost("averaging", 10)  # 40 bytes at 20 bytes/s, one learner of a host after the other
        return updated, team.now()

    cluster = cluster_of()
    assert cluster.run(main) == {0: (2.0, 4.0), 1: (2.0, 6.0), 2: (2.0, 4.0), 3: (2.0, 6.0)}
    assert cluster.comm_stats[1].waiting_seconds == 0.0


def test_updates_share_their_hosts_bus() -> None:
    def main(team: SimTeam) -> float:
        team.simulate_cost("update", 20)  # 80 bytes: 2 s at the device's 40 bytes/s, 1.6 s of the bus at 50 bytes/s
        return team.now()

    assert run(main, host_update_bandwidth=50.0) == {0: 2.0, 1: 3.6, 2: 2.0, 3: 3.6}
    assert run(main, host_update_bandwidth=20.0) == {0: 4.0, 1: 8.0, 2: 4.0, 3: 8.0}


def test_devices_factor_gradients_beside_each_other() -> None:
    def main(team: SimTeam) -> float:
        team.simulate_cost("factoring", 20)  # 80 bytes at 10 bytes/s
        return team.now()

    assert set(run(main, factoring_bandwidth=10.0).values()) == {8.0}
    assert set(run(main).values()) == {0.0}


def test_powersgd_takes_the_time_of_its_products() -> None:
    def seconds(**changes: float) -> float:
        workload = Workload("toy", bytes=4e3, seconds_per_batch={"toy": 1.0})
        cluster = hardware(jitter=0.0, **changes)
        return time_epoch(Powersgd, cluster, workload, learners=4, batches=40, elements=1024, density=0.01).seconds

    assert seconds(factoring_bandwidth=8e3) == pytest.approx(seconds() + 10 * 0.5)
