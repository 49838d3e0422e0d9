from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from asr_am.distributed.cluster_config import Crash, Faults, Workload
from asr_am.distributed.launch_spec import LaunchSpec
from asr_am.distributed.leases import Lease, StepResult
from asr_am.distributed.runtime.fault_injection import ComputeEmulator, MessageFaults, arm_crash
from asr_am.distributed.team import CommStats
from asr_am.errors import InputError


def step_result(frames: float) -> StepResult:
    return StepResult(Lease(0, 0, 0, 1), frames, 1, 0.1, torch.zeros(()), torch.zeros(()))


class Clock:
    """A batch that takes 3 s, with buckets ready after 1 and 3, on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, comm_stats: CommStats) -> None:
        self.now, self.comm_stats = 100.0, comm_stats
        self.buckets: list[tuple[float, int]] = []
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def gradient(self, on_bucket: object) -> StepResult:
        self.now += 1.0
        self.comm_stats.waiting_seconds += 1.0  # for its lease
        for passed, begin in ((1.0, 2), (2.0, 1)):
            self.now += passed
            if on_bucket is not None:
                on_bucket(begin, 9)  # type: ignore[operator]
        return step_result(50.0)

    def ready(self, begin: int, end: int) -> None:
        self.buckets.append((self.now - 100.0, begin))


def test_a_slow_learner_takes_longer_for_everything_but_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    comm_stats = CommStats()
    clock = Clock(monkeypatch, comm_stats)
    compute_emulator = ComputeEmulator(Faults(slow={1: 10.0}), None, "cpu", 1, comm_stats)
    slowed = compute_emulator.apply(clock.gradient, clock.sleep)
    assert slowed(clock.ready) is not None
    assert clock.buckets == [(11.0, 2), (31.0, 1)] and clock.now == pytest.approx(131.0)
    assert comm_stats.faults == {"slow": 1}
    slowed(None)
    assert clock.now == pytest.approx(162.0) and len(clock.buckets) == 2
    assert compute_emulator.apply(lambda on_bucket: None, clock.sleep)(None) is None


def test_what_a_device_computes_later_is_stretched_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is given a batch in no time, and computes it for 3 s, which only a wait for it shows."""
    comm_stats, queue = CommStats(), [5.0]  # seconds of work before this batch
    clock = Clock(monkeypatch, comm_stats)

    def launch(on_bucket: object) -> StepResult:
        queue.append(3.0)
        return step_result(50.0)

    def synchronize() -> None:
        while queue:
            clock.now += queue.pop()

    compute_emulator = ComputeEmulator(Faults(slow={1: 10.0}), None, "cuda", 1, comm_stats, synchronize)
    compute_emulator.apply(launch, clock.sleep)(None)
    assert clock.now == pytest.approx(100 + 5 + 30)


def test_others_are_left_alone() -> None:
    def gradient(on_bucket: object) -> None:
        return None

    compute_emulator = ComputeEmulator(
        Faults(slow={1: 10.0}), Workload("w", seconds_per_batch={"cpu": 1.0}), "cpu", 0, CommStats()
    )
    assert compute_emulator.apply(gradient, lambda _: None) is gradient


def test_computing_time_is_emulated_by_the_frames_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    comm_stats = CommStats()
    clock = Clock(monkeypatch, comm_stats)
    workload = Workload("w", seconds_per_batch={"P100": 60.0}, emulate=True)
    compute_emulator = ComputeEmulator(Faults(slow={0: 2.0}), workload, "P100", 0, comm_stats)
    compute_emulator.max_frames = 100.0
    compute_emulator.apply(clock.gradient, clock.sleep)(clock.ready)
    assert clock.now == pytest.approx(101.0 + 2 * 60 / 2) and comm_stats.faults == {"slow": 1}
    shares = {begin: 1 / 3 + 2 / 3 * (1 - begin / 9) for begin in (2, 1)}  # the last elements are complete first
    assert clock.buckets == [(pytest.approx(1 + 60 * share), begin) for begin, share in shares.items()]
    with pytest.raises(InputError, match="seconds_per_batch"):
        ComputeEmulator(Faults(), workload, "V100", 0, comm_stats)


def test_the_same_messages_are_late_and_lost_each_time() -> None:
    faults = Faults(late_share=0.3, late_seconds=5.0, lost_share=0.2)

    def message_faults(rank: int, incarnation: int) -> list[tuple[bool, bool]]:
        comm_stats, fate = CommStats(), MessageFaults(faults, rank, incarnation)
        drawn = [(fate.loses(comm_stats), fate.due(comm_stats, "weights") > time.monotonic()) for _ in range(500)]
        assert comm_stats.lost == comm_stats.faults["lost"] == sum(lost for lost, _ in drawn)
        assert comm_stats.faults["late"] == sum(late for _, late in drawn)
        assert 60 < comm_stats.lost < 140 and 100 < comm_stats.faults["late"] < 200
        return drawn

    assert message_faults(1, 0) == message_faults(1, 0) != message_faults(1, 1)
    only_pulls = MessageFaults(replace(faults, late_share=1.0, late_tag="pull"), 1, 0)
    assert only_pulls.due(CommStats(), "weights") == 0.0 < only_pulls.due(CommStats(), "pull")


def test_only_the_first_incarnation_crashes() -> None:
    faults, comm_stats = Faults(crashes=[Crash(1, 3600.0)]), CommStats()
    assert arm_crash(faults, 0, 0, comm_stats) is None and arm_crash(faults, 1, 1, comm_stats) is None
    assert comm_stats.faults == {"crash": 1}, "told by the one that came back"
    timer = arm_crash(faults, 1, 0, comm_stats)
    assert timer is not None and timer.interval == 3600.0
    timer.cancel()


def test_who_is_started_again_and_when() -> None:
    faults = Faults(crashes=[Crash(1, 5.0, None), Crash(2, 5.0, 9.0)])
    plan = LaunchSpec(["true"], 3, False, restart_after=1.0, max_restarts=3, faults=faults)
    assert [plan.restart_seconds(rank, 0) for rank in range(3)] == [0.0, None, 9.0]
    assert [plan.restart_seconds(2, deaths) for deaths in (1, 2, 3)] == [1.0, 2.0, None]
