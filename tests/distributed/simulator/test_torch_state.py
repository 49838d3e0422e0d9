"""State that torch keeps per thread must be per task: each test fails if the scheduler does not switch it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from asr_am.distributed.simulator import SimTeam
from asr_am.distributed.simulator.scheduler import Scheduler, TorchModes
from tests.support.round_cluster import run


def gradients_flow_while_another_validates() -> object:
    def main(team: SimTeam) -> bool:
        if team.rank == 0:
            with torch.no_grad():
                team.sleep(2.0)
        else:
            team.sleep(1.0)
        return torch.is_grad_enabled()

    return run(main, 2)


def precision_is_a_tasks_own() -> object:
    a, b = torch.full((2, 2), 1.001), torch.eye(2)

    def main(team: SimTeam) -> torch.dtype:
        if team.rank == 0:
            with torch.autocast("cpu", torch.bfloat16):
                team.sleep(2.0)
                return (a @ b).dtype
        team.sleep(1.0)
        return (a @ b).dtype

    return run(main, 2)


def changed_weights_are_cast_anew() -> object:
    """torch keeps a weight's bfloat16 copy until the outermost autocast is left, by any task of the thread."""
    weight = torch.nn.Parameter(torch.ones(1, 1))

    def main(team: SimTeam) -> float:
        with torch.autocast("cpu", torch.bfloat16):
            if team.rank == 0:
                team.sleep(3.0)
                return torch.nn.functional.linear(torch.ones(1, 1), weight).item()
        team.sleep(1.0)
        for value in (5.0, 7.0):
            with torch.no_grad():
                weight.fill_(value)
            with torch.autocast("cpu", torch.bfloat16):
                out = torch.nn.functional.linear(torch.ones(1, 1), weight).item()
        return out

    return run(main, 2)


def random_numbers_do_not_depend_on_the_clock() -> object:
    def main(team: SimTeam) -> list[float]:
        torch.manual_seed(7)
        drawn = []
        for _ in range(3):
            drawn.append(float(torch.rand(())))
            team.sleep(1.0 + team.rank)
        return drawn

    drawn = run(main, 3)
    return drawn[0] == drawn[1] == drawn[2]


SCENES: list[tuple[Callable[[], object], object]] = [
    (gradients_flow_while_another_validates, {0: True, 1: True}),
    (precision_is_a_tasks_own, {0: torch.bfloat16, 1: torch.float32}),
    (changed_weights_are_cast_anew, {0: 7.0, 1: 7.0}),
    (random_numbers_do_not_depend_on_the_clock, True),
]


@pytest.mark.parametrize(("scene", "expected"), SCENES, ids=lambda value: getattr(value, "__name__", ""))
def test_each_task_has_its_own(scene: Callable[[], object], expected: object) -> None:
    torch.manual_seed(11)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert scene() == expected
        assert not torch.is_grad_enabled() and torch.is_autocast_enabled("cpu")  # the caller's is as it was
    torch.manual_seed(11)
    before = torch.get_rng_state()
    scene()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("scene", "expected"), SCENES, ids=lambda value: getattr(value, "__name__", ""))
def test_these_tests_see_a_scheduler_that_does_not_switch(
    scene: Callable[[], object], expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchModes, "restore", lambda self, present: None)
    monkeypatch.setattr(Scheduler, "_take_random", lambda self, task: None)
    with torch.random.fork_rng():
        assert scene() != expected


def test_new_tasks_draw_different_numbers() -> None:
    def main(team: SimTeam) -> list[float]:
        drawn = [float(torch.rand(()))]
        for name in ("draw", "draw", "draw more"):
            team.spawn(lambda: drawn.append(float(torch.rand(()))), name).join()
        return drawn

    assert len({number for numbers in run(main, 2).values() for number in numbers}) == 8


def test_inference_mode_cannot_be_left_and_entered_again() -> None:
    def main(team: SimTeam) -> None:
        with torch.inference_mode():
            team.sleep(1.0)

    with pytest.raises(RuntimeError, match="no_grad"):
        run(main, 1)
