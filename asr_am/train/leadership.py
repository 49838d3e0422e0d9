"""Which learner of a team writes the files of a run.

The *leader* is the live learner with the lowest rank. The drained team elects it in its gathers (`Leadership`). What
only a leader does, such as validation and the end of a checkpoint, is done again by the next one if it dies meanwhile.

A learner may be stopped for minutes and go on after its successor has begun. So leaders follow each other in *terms*,
numbered by the files `.term-<number>`, which name the launch and the leader (`Terms`). Only one leader can create the
file of a term, and only that of the newest term may write. It removes the temporary files of all others. What an
earlier leader was about to do, stopped between its last check and a rename, then fails. A launch whose term is followed
by one of a later launch claims none any more, whichever of its learners would be the leader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from asr_am import disk
from asr_am.distributed.team import Team
from asr_am.errors import InputError

TERM = ".term-"
CLAIM = ".claim-"
CHECKS = 100  # of the newest term, which is removed as soon as the next one is there


class Terms:
    """The terms of a run's leaders.

    Args:
        directory: `checkpoints/` of the run.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._launch = ""
        self._own: Path | None = None  # that this learner leads
        self._earlier: list[Path] | None = None  # of earlier launches

    @property
    def launch(self) -> str:
        """Identity of the launch that this learner belongs to, "" before `open`."""
        return self._launch

    @property
    def writer(self) -> str:
        """Name of the present term, for the names of temporary files."""
        return f"{self._own.name.removeprefix(TERM)}." if self._own else ""

    def open(self, launch: str, rejoins: bool = False) -> None:
        """Notes the launch that this learner belongs to. `check` fails once another launch has claimed a term.

        Args:
            launch: identity of the launch that has started this learner.
            rejoins: the launch has had leaders before this learner was started.
        """
        self._launch, self._own = launch, None
        if self._earlier is None:
            self._earlier = [] if rejoins else self._terms()

    def claim(self, leader: str, confirm: Callable[[], None]) -> None:
        """Begins a new term: this leader may write from now on, and nobody else.

        Args:
            leader: name of the leader, unique in its launch.
            confirm: returns when the team has said that this learner belongs to it. A learner that was replaced while
                it was stopped never gets that answer. So it does not claim a term after its successor.

        Raises:
            InputError: another launch has claimed a term meanwhile.
        """
        claim = self._directory / f"{CLAIM}{leader}.{self._launch}"
        disk.write(claim, lambda file: file.write(f"{self._launch} {leader}\n".encode()))
        while True:
            before = self._terms()
            if before and before[-1] not in (self._earlier or ()) and not self._is_of_launch(before[-1]):
                if not before[-1].exists():
                    continue  # the next term has just been claimed
                disk.remove(claim)
                raise self._taken_over()
            confirm()
            number = 1 + (int(before[-1].name.removeprefix(TERM)) if before else 0)
            term = self._directory / f"{TERM}{number:09d}"
            try:
                disk.link(claim, term)
                break
            except FileExistsError:
                continue  # claimed by a leader that has died since
            except FileNotFoundError as error:
                raise self._taken_over() from error
        disk.sync_dir(self._directory)
        self._own = term
        self._remove_temporary_files([claim, *before])

    def _remove_temporary_files(self, claimed: list[Path]) -> None:
        """Removes what is unfinished of others, and the files of `claimed`."""
        others = [path for path in self._directory.glob(f"{CLAIM}*") if self._launch not in path.name]
        temporary = [*self._directory.parent.glob(".*.tmp"), *self._directory.glob(".*.removed")]
        for old in [*claimed, *others, *temporary]:
            disk.remove(old)
        for partial in self._directory.glob("checkpoint-*.partial"):
            if self._launch not in partial.name:
                disk.remove_at_once(partial)

    def resign(self) -> None:
        """Ends this learner's term: another one is to claim the next."""
        self._own = None

    def check(self) -> None:
        """Raises InputError if another launch, or another leader, has claimed a term. Called before writing."""
        if not self._directory.is_dir():
            raise InputError(f"{self._directory}: was removed while the run wrote there; start it again")
        for _ in range(CHECKS):
            newest = self._terms()[-1:]
            leads = newest == [self._own]
            follows = self._own is None and newest and self._is_of_launch(newest[0])
            if leads or follows:
                return
            if newest and newest[0].exists():
                break  # else the next leader is just replacing the term that was listed
        raise self._taken_over()

    def _is_of_launch(self, term: Path) -> bool:
        """Returns True if a term is of this launch."""
        try:
            return term.read_text(encoding="utf-8").split()[0] == self._launch
        except (OSError, IndexError):  # it has just been removed by the next leader
            return False

    def _taken_over(self) -> InputError:
        return InputError(f"{self._directory}: another start of this run writes here now; this learner has ended")

    def _terms(self) -> list[Path]:
        return sorted(self._directory.glob(f"{TERM}*"))


class Leadership:
    """The leader of a team, as one learner knows it. All learners make the same calls, but for `claim`.

    Args:
        team: this learner's end of the team.
        terms: the terms of the run's leaders.
        take_over: called after this learner has claimed a term of a leader that has died.

    Attributes:
        leader: rank of the leader. None before the first election, and for a restarted learner.
    """

    def __init__(self, team: Team, terms: Terms, take_over: Callable[[], None]) -> None:
        self._team, self._terms, self._take_over = team, terms, take_over
        self.leader: int | None = None

    @property
    def leads(self) -> bool:
        """True if this learner is the leader."""
        return self.leader == self._team.rank

    def claim(self) -> None:
        """Stops all earlier leaders from writing."""
        self._terms.claim(f"{self._team.rank}.{self._team.incarnation}", self._team.confirm)

    def elect(self, rows: Mapping[int, object]) -> None:
        """Makes the lowest rank that took part in a gather the leader. All learners agree on it.

        Only for gathers of a closed segment, which no restarted learner joins: it would take itself for the dead one.
        """
        before, self.leader = self.leader, min(rows)
        if not self.leads:
            self._terms.resign()
        elif before != self.leader:
            self.claim()
            self._take_over()

    def do(self, work: Callable[[], Sequence[float]], otherwise: Sequence[float]) -> list[float]:
        """Has the leader do something, and returns its result to all learners.

        Args:
            work: what the leader does. If it dies meanwhile, the next leader does it again.
            otherwise: what a learner that does not lead sends instead of a result.
        """
        while True:
            rows = self._team.gather(torch.tensor(work() if self.leads else otherwise, dtype=torch.float64))
            if self.leader in rows:
                return rows[self.leader].tolist()
            self.elect(rows)
