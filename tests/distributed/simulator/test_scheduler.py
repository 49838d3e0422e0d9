from __future__ import annotations

from functools import partial

import pytest
import torch

from asr_am.distributed.simulator import SimTeam
from tests.support.round_cluster import cluster_of, run


def test_only_modelled_time_passes_and_the_earliest_goes_on_first() -> None:
    order: list[tuple[float, int]] = []

    def main(team: SimTeam) -> float:
        for _ in range(3):
            team.sleep(1.0 + team.rank)
            order.append((team.now(), team.rank))
        return team.now()

    assert run(main, 3) == {0: 3.0, 1: 6.0, 2: 9.0}
    # of two entries for one time, the one that was made first is taken first
    assert order == [(1, 0), (2, 1), (2, 0), (3, 2), (3, 0), (4, 1), (6, 2), (6, 1), (9, 2)]


def test_no_wait_is_too_short_to_move_the_clock() -> None:
    def main(team: SimTeam) -> float:
        team.sleep(1e6)
        team.sleep(1e-20)
        return team.now()

    assert run(main, 1)[0] > 1e6


def test_same_seed_same_bits_other_seed_other_times() -> None:
    def main(team: SimTeam) -> list[object]:
        team.register_tag("w", 3)
        compute = team.timed(lambda on_bucket: None)
        trace: list[object] = [compute(None), torch.rand(2).tolist()]
        x = torch.rand(5)
        for _ in range(5):
            team.sleep(float(torch.rand(())))
            team.send((team.rank + 1) % team.size, "w", 0, x[:3])
            message = team.recv("w", timeout=2.0)
            team.start_all_reduce_mean(x).wait()
            trace += [team.now(), x.tolist(), None if message is None else message.tensors[0].tolist()]
        return trace

    def once(seed: int) -> tuple[object, ...]:
        cluster = cluster_of(seed=seed, jitter=0.3, faults={"lost_share": 0.3, "late_share": 0.3, "late_seconds": 1.0})
        return cluster.run(main), cluster.now, cluster.comm_stats

    torch.manual_seed(3)
    first = once(1)
    torch.manual_seed(4)  # the caller's random state is no part of a run
    assert once(1) == first
    assert once(2) != first


def test_a_deadlock_is_an_error_that_says_who_waits_for_what() -> None:
    def main(team: SimTeam) -> None:
        if team.rank == 0:
            team.event().wait()
        elif team.rank == 1:
            team.recv("weights", source=0)
        elif team.rank == 2:
            team.start_all_reduce_mean(torch.zeros(1)).wait()
        else:
            team.gather(torch.zeros(1))

    with pytest.raises(RuntimeError) as caught:
        run(main)
    assert str(caught.value) == (
        "deadlock at 0.000000 s: supervisor waits for a message; learner 0 'training' waits for an event; "
        "learner 1 'training' waits for a message 'weights' from learner 0; "
        "learner 2 'training' waits for all-reduce 0, started by 1 of 4; "
        "learner 3 'training' waits for the answer to gather"
    )


def test_a_timer_that_nobody_needs_any_more_moves_no_clock() -> None:
    def main(team: SimTeam) -> bool:
        event = team.event()
        team.spawn(event.set, "set")
        return event.wait(timeout=1e6)

    cluster = cluster_of(1)
    assert cluster.run(main) == {0: True} and cluster.now == 0.0


def test_locks_are_passed_on_in_order_and_waiting_is_counted() -> None:
    order: list[str] = []

    def main(team: SimTeam) -> None:
        lock = team.lock()

        def work(name: str, before: float, inside: float) -> None:
            team.sleep(before)
            with lock:
                order.append(f"{name} {team.now():g}")
                team.sleep(inside)

        for name, before, inside in (("a", 0.0, 5.0), ("b", 2.0, 1.0), ("c", 1.0, 1.0)):
            team.spawn(partial(work, name, before, inside), name)
        work("training", 3.0, 10.0)

    cluster = cluster_of(1)
    cluster.run(main)
    assert order == ["a 0", "c 5", "b 6", "training 7"]
    assert cluster.comm_stats[0].waiting_seconds == 4.0  # of the training task, from 3 to 7; sleeping is not waiting


def test_a_lock_is_left_by_an_error_and_refuses_its_holder() -> None:
    def main(team: SimTeam) -> str:
        lock = team.lock()
        with pytest.raises(ZeroDivisionError), lock:
            _ = 1 / 0
        with lock, pytest.raises(RuntimeError, match="acquires a lock that it holds"), lock:
            pass
        with lock:
            return "free again"

    assert run(main, 1) == {0: "free again"}


def test_whoever_stops_waiting_for_a_lock_does_not_get_it() -> None:
    def main(team: SimTeam) -> float:
        lock = team.lock()

        def hold() -> None:
            with lock:
                team.sleep(2.0)

        def fail() -> None:
            team.sleep(1.0)
            raise ValueError

        team.spawn(hold, "hold")
        team.spawn(fail, "fail")
        team.sleep(0.5)
        with pytest.raises(ValueError), lock:
            pass
        gave_up_at = team.now()
        with lock:
            return gave_up_at + team.now()

    assert run(main, 1) == {0: 1.0 + 2.0}


def test_events() -> None:
    def main(team: SimTeam) -> tuple[object, ...]:
        event = team.event()

        def pulses() -> None:
            for _ in range(2):
                team.sleep(1.0)
                event.set()
                event.clear()  # a task that waits is woken nevertheless, as by threading.Event

        team.spawn(pulses, "pulses")
        told = event.wait(0.5), event.wait(2.0), team.now(), event.is_set()
        team.sleep(3.0)  # not for the event: the second pulse ends nothing
        return *told, team.now(), event.wait(0.5), team.now()

    assert run(main, 1) == {0: (False, True, 1.0, False, 4.0, False, 4.5)}


def test_join_waits_for_the_end_of_a_task() -> None:
    def main(team: SimTeam) -> tuple[float, float]:
        task = team.spawn(lambda: team.sleep(2.0), "nap")
        task.join(timeout=0.5)
        early = team.now()
        task.join()
        return early, team.now()

    assert run(main, 1) == {0: (0.5, 2.0)}


def test_an_error_of_a_communication_task_is_raised_in_the_training_task() -> None:
    def main(team: SimTeam) -> str:
        def fail() -> None:
            team.sleep(1.0)
            raise ValueError("no such weights")

        team.spawn(fail, "fail")
        try:
            team.sleep(5.0)
        except ValueError as error:
            return f"{error} at {team.now():g} s"
        return "not told"

    assert run(main, 2) == {0: "no such weights at 1 s", 1: "no such weights at 1 s"}


def test_an_error_of_a_communication_task_is_not_lost_when_training_ends_at_once() -> None:
    def main(team: SimTeam) -> None:
        def fail() -> None:
            raise ValueError("unheard")

        def end() -> None:
            team.spawn(fail, "fail").join()

        try:
            end()
        except ValueError:
            team.spawn(fail, "again")
            team.spawn(lambda: team.sleep(1.0), "nap")
        team.sleep(0.0)

    with pytest.raises(ValueError, match="unheard"):
        run(main, 1)


def test_an_error_of_a_learner_ends_the_run_and_unwinds_the_others() -> None:
    unwound: list[str] = []

    def main(team: SimTeam) -> None:
        def listen() -> None:
            try:
                team.recv("nothing")
            finally:
                unwound.append(f"task {team.rank}")

        team.spawn(listen, "listen")
        try:
            team.sleep(1.0)
            if team.rank == 2:
                raise ValueError("learner 2 has had enough")
            team.sleep(1.0)
        finally:
            unwound.append(f"training {team.rank}")
            team.sleep(1.0)  # nobody can wait any more

    with pytest.raises(ValueError, match="learner 2 has had enough"):
        run(main)
    assert sorted(unwound) == [f"{what} {rank}" for what in ("task", "training") for rank in range(4)]


def test_tasks_end_with_the_training_task() -> None:
    heard: list[float] = []

    def main(team: SimTeam) -> None:
        def tick() -> None:
            while True:
                team.sleep(1.0)
                heard.append(team.now())

        team.spawn(tick, "tick")
        team.sleep(2.5)

    cluster = cluster_of(1)
    cluster.run(main)
    assert heard == [1.0, 2.0] and cluster.now == 2.5


def test_a_cluster_is_for_one_run() -> None:
    cluster = cluster_of(1)
    cluster.run(lambda team: None)
    with pytest.raises(RuntimeError, match="runs once"):
        cluster.run(lambda team: None)
