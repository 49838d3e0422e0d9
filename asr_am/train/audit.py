"""Checks the history of a finished run: `python -m asr_am.train.audit RUN ...`.

It reads what the run has left: leases.jsonl, metrics.jsonl, summary.json, best.pt and the checkpoints. Virtual runs and
runs of real processes leave the same files. In a run that kept its promises

- every batch of every epoch was completed once, in segments that follow each other, from examples of its own, also
  where the number of learners changed,
- every completed gradient was applied at every parameter server, or is counted as dropped (`psp`), or as lost with the
  learner or the server that died,
- every epoch is in metrics.jsonl once, and the checkpoints, the summary and best.pt agree with these epochs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from asr_am.data.record import read_record
from asr_am.errors import InputError
from asr_am.models.model_file import load_acoustic_model, read_torch
from asr_am.train.checkpoint import COMPLETE

Line = dict[str, Any]
NOT_A_RUN = "is this the folder of a finished run?"


@dataclass
class History:
    """Verdict on a run.

    Attributes:
        batches: completed batches.
        counts: batches that were `leased again` after a death, `dropped` by the algorithm, completed by a learner that
            died in the same segment (`owner died`), or lost at a parameter server that died (`server died`). For each
            parameter server, batches that it `dropped` or that were `lost with the learner` count, too.
        deaths: learners that died in a segment that counts.
        problems: what must not be. Empty in a good run.
    """

    batches: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    deaths: int = 0
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        counts = "".join(f", {count} {name}" for name, count in sorted(self.counts.items()) if count)
        verdict = "; ".join(self.problems) if self.problems else "no problem"
        return f"{self.batches} batches, {self.deaths} deaths{counts}: {verdict}"


def audit(run: Path) -> History:
    """Checks a finished run. Raises InputError if a file is missing, cannot be read or is not as a run writes it."""
    history = History()
    leases, metrics = _read_lines(run / "leases.jsonl"), _read_lines(run / "metrics.jsonl")
    summary = read_record(run / "summary.json", remedy=NOT_A_RUN)
    try:
        _check_leases(leases, str(summary["strategy"]), history)
        _check_epochs(metrics, leases, summary, history)
        _check_checkpoints(run, leases, metrics, history)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise InputError(
            f"{run}: leases.jsonl, metrics.jsonl, summary.json or a checkpoint is not as a run writes it ({error!r}); "
            "train again"
        ) from error
    return history


def check_records(run: Path) -> None:
    """Raises InputError if a record of a finished training is missing or damaged: nothing writes it again."""
    try:
        read_record(run / "summary.json", remedy=NOT_A_RUN)
        for name in ("metrics.jsonl", "leases.jsonl"):
            if not _read_lines(run / name):
                raise InputError(f"{run / name}: is empty")
    except InputError as error:
        raise InputError(
            f"{error}; all epochs are done, so it is not written again: keep best.pt if you need it, and remove {run}"
        ) from error


def _read_lines(path: Path) -> list[Line]:
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error}); {NOT_A_RUN}") from error


def _check_leases(lines: list[Line], strategy: str, history: History) -> None:
    """Checks that the segments cover every epoch once, and accounts for every gradient."""
    expected = (1, Fraction(0))  # epoch and first round of the next segment: teams of other sizes have other batches
    incarnations: dict[tuple[str, int], int] = {}  # of learners, by launch: each counts them anew
    for line in lines:
        epoch, batches, launch = line["epoch"], sorted(line["batch"]), line.get("launch", "")
        first, end, learners = batches[0], batches[-1] + 1, line["learners"]
        where = f"epoch {epoch}, batches {first}..{end - 1}"
        if (epoch, Fraction(first, learners)) != expected or batches != list(range(first, end)):
            batch = expected[1] * learners
            history.problems.append(f"{where}: epoch {expected[0]} was to continue at batch {batch}")
        expected = (epoch + 1, Fraction(0)) if end == line["batches"] else (epoch, Fraction(end, learners))
        digests = Counter(digest for digest in line["digest"] if digest)
        if digests and max(digests.values()) > 1:
            history.problems.append(f"{where}: two batches have the same examples")
        owners = dict(zip(line["batch"], zip(line["owner"], line["incarnation"], strict=True), strict=True))
        if not launch and any(number == 0 < incarnations.get(("", owner), 0) for owner, number in owners.values()):
            incarnations.clear()  # a virtual run was started again
        for owner, incarnation in owners.values():
            if incarnation < incarnations.get((launch, owner), 0):
                history.problems.append(f"{where}: incarnation {incarnation} of learner {owner} came back")
        for owner, incarnation in owners.values():
            incarnations[launch, owner] = max(incarnation, incarnations.get((launch, owner), 0))
        lost = {(rank, incarnation) for rank, incarnation in line["lost"]}
        history.batches += len(batches)
        history.deaths += len(lost)
        history.counts["leased again"] += len(line["released"])
        history.counts["dropped"] += line["applied"].count(False)
        history.counts["owner died"] += sum(owner in lost for owner in owners.values())
        _check_servers(line, where, strategy, owners, lost, history)
    if expected[1]:
        history.problems.append(f"epoch {expected[0]} ends at round {expected[1]}")


def _check_servers(
    line: Line, where: str, strategy: str, owners: dict[int, tuple[int, int]], lost: set[tuple[int, int]],
    history: History,
) -> None:  # fmt: skip
    """Accounts for gradients that a parameter server has not applied.

    Args:
        line: a line of leases.jsonl.
        where: the segment, for messages.
        strategy: name of the strategy.
        owners: (rank, incarnation) that completed each batch.
        lost: (rank, incarnation) of the learners that died.
        history: where to count.
    """
    for server in line["servers"]:
        died = any(rank == server["rank"] for rank, _ in lost)
        missing_of_dead: Counter[tuple[int, int]] = Counter()
        for batch in server["missing"]:
            if strategy == "psp":
                history.counts["dropped by a server"] += 1
            elif died:
                history.counts["server died"] += 1
            elif owners[batch] in lost:
                history.counts["lost with the learner"] += 1
                missing_of_dead[owners[batch]] += 1
            else:
                history.problems.append(f"{where}: server {server['shard']} has not applied batch {batch}")
        for (rank, _), count in missing_of_dead.items():
            if count > 1:
                history.problems.append(f"{where}: server {server['shard']} lacks {count} batches of learner {rank}")


def _check_epochs(metrics: list[Line], leases: list[Line], summary: Line, history: History) -> None:
    epochs = [line["epoch"] for line in metrics if "train_loss" in line]
    if epochs != list(range(1, len(epochs) + 1)):
        history.problems.append(f"metrics.jsonl has the epochs {epochs}")
    if epochs and leases and epochs[-1] != leases[-1]["epoch"]:
        history.problems.append(f"metrics.jsonl ends with epoch {epochs[-1]}, leases.jsonl with {leases[-1]['epoch']}")
    losses = [line["heldout_loss"] for line in metrics if "heldout_loss" in line]
    if summary.get("heldout_loss", []) != losses:  # a run on dev has none
        history.problems.append("summary.json has other held-out losses than metrics.jsonl")
    updates = [line["batch"] for line in metrics if "train_loss" not in line]
    if updates != sorted(set(updates)):
        history.problems.append("metrics.jsonl goes back")


def _check_checkpoints(run: Path, leases: list[Line], metrics: list[Line], history: History) -> None:
    """Checks that the checkpoints go forward, and that the newest one and best.pt are those of the last epoch."""
    cursors = []
    for path in sorted((run / "checkpoints").glob("checkpoint-*")):
        if path.suffix == ".partial":
            history.problems.append(f"{path.name} was left")
        elif COMPLETE.fullmatch(path.name):  # else set aside as damaged, or the user's
            cursors.append(read_torch(path / "run.pt", "train again")["cursor"])
    if not cursors:
        raise InputError(f"{run / 'checkpoints'}: no checkpoint: is {run} a finished run?")
    places = [(cursor["epoch"], cursor["done"]) for cursor in cursors]
    if places != sorted(set(places)):
        history.problems.append(f"checkpoints at (epoch, batch) {places}")
    if leases and places[-1] != (leases[-1]["epoch"], 0):
        history.problems.append(f"the last checkpoint is at (epoch, batch) {places[-1]}")
    sizes = [(run / name).stat().st_size for name in ("metrics.jsonl", "leases.jsonl")]
    if cursors[-1]["kept"] != sizes:
        history.problems.append("metrics.jsonl or leases.jsonl has lines that no checkpoint counts")
    losses = [line["heldout_loss"] for line in metrics if "heldout_loss" in line]
    if [record["heldout_loss"] for record in cursors[-1]["history"] if "heldout_loss" in record] != losses:
        history.problems.append("the last checkpoint has other held-out losses than metrics.jsonl")
    best = load_acoustic_model(run / "best.pt")[1]
    if losses and (best["heldout_loss"] != min(losses) or losses[best["epoch"] - 1 :][:1] != [min(losses)]):
        history.problems.append(f"best.pt is of epoch {best['epoch']}, held-out loss {best['heldout_loss']}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m asr_am.train.audit", description="Checks finished runs.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directory of a run")
    failed = False
    for run in parser.parse_args().runs:
        try:
            history = audit(run)
        except InputError as error:
            print(error, file=sys.stderr)
            failed = True
            continue
        print(f"{run}: {history}")
        failed = failed or bool(history.problems)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
