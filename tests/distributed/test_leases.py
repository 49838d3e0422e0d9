from __future__ import annotations

import random

import pytest

from asr_am.distributed.leases import Leases


def test_batches_are_handed_out_in_order_once() -> None:
    leases = Leases(4)
    taken = [leases.lease(owner) for owner in (0, 1, 0, 1)]
    assert [(lease.batch, lease.leased, lease.total) for lease in taken if lease] == [(n, n, 4) for n in range(4)]
    assert leases.lease() is None and not leases.finished
    for lease, owner in zip(taken, (0, 1, 0, 1), strict=True):
        assert lease is not None
        leases.complete(lease.batch, owner, applied=lease.batch != 2)
    leases.audit()
    assert leases.finished and leases.done_by() == {0: 2, 1: 2} and leases.dropped() == 1


def test_only_the_holder_completes_and_only_once() -> None:
    leases = Leases(2)
    leases.lease(owner=0, incarnation=1)
    for owner, incarnation, batch in ((1, 1, 0), (0, 0, 0), (0, 1, 1)):
        with pytest.raises(ValueError, match="does not hold"):
            leases.complete(batch, owner, incarnation)
    leases.complete(0, 0, 1)
    with pytest.raises(ValueError, match="does not hold"):
        leases.complete(0, 0, 1)


def test_the_leases_of_the_dead_are_handed_out_again() -> None:
    leases = Leases(5)
    for owner in (0, 1, 0):
        leases.lease(owner)
    leases.complete(0, 0)
    assert leases.release(0) == [2] and leases.leased == 2
    again = leases.lease(1)
    assert again is not None and again.batch == 2
    with pytest.raises(RuntimeError, match="1 of 5"):
        leases.audit()


def test_every_batch_is_completed_once_whoever_dies() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        leases, incarnation, held = Leases(40), [0] * 5, [[] for _ in range(5)]
        completed: list[int] = []
        for _ in range(100_000):
            if leases.finished:
                break
            owner = rng.randrange(5)
            if rng.random() < 0.05:
                assert sorted(held[owner]) == leases.release(owner)
                held[owner], incarnation[owner] = [], incarnation[owner] + 1
            elif held[owner] and rng.random() < 0.6:
                batch = held[owner].pop()
                leases.complete(batch, owner, incarnation[owner])
                completed.append(batch)
            elif (lease := leases.lease(owner, incarnation[owner])) is not None:
                held[owner].append(lease.batch)
            if rng.random() < 0.1:  # everybody resumes from a checkpoint
                state = leases.state_dict()
                leases, held = Leases(40), [[] for _ in range(5)]
                leases.load_state_dict(state)
        leases.audit()
        assert sorted(completed) == list(range(40))


def test_a_state_of_another_epoch_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        Leases(3).load_state_dict(Leases(4).state_dict())
