"""Random kills of real processes, for every asynchronous strategy: `python -m tests.support.process_soak 20`.

Each run trains a small network with four learners. Learners 0 and 2 have the parameter servers, and 0 is the leader.
A second thread kills learners with SIGKILL: one, two at once or all, after a random time or when a checkpoint is being
completed. Afterwards `asr_am.train.audit` checks the
history of the run. The time to recover is that from a kill to the next completed checkpoint.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from asr_am.distributed.runtime import worker_process
from asr_am.distributed.runtime.launcher import launch
from asr_am.errors import InputError
from asr_am.train.audit import audit
from tests.support.egs_examples import write_examples
from tests.support.forked_workers import ForkedPopen

STRATEGIES = ("adpsgd", "ps_async", "psp")
RESTART_AFTER = 0.1  # seconds
LIMIT = 240.0  # seconds after which a run counts as hanging
EPOCHS = 6


@dataclass
class Kills:
    """Kills learners of a run from a thread of its own.

    Args:
        run: directory of the run.
        rng: chooses whom and when.
        limit: number of kills after which the run is left alone.

    Attributes:
        kinds: number of kills by kind.
        recovered: seconds from each kill to the next completed checkpoint.
        hangs: the run took longer than `LIMIT`, and was ended.
    """

    run: Path
    rng: random.Random
    limit: int
    kinds: Counter[str] = field(default_factory=Counter)
    recovered: list[float] = field(default_factory=list)
    hangs: bool = False
    _pids: dict[int, int] = field(default_factory=dict)  # by rank
    _over: threading.Event = field(default_factory=threading.Event)

    def start_process(self, command: Sequence[str], env: dict[str, str], **options: Any) -> ForkedPopen:
        """Stands in for `subprocess.Popen`, and remembers the process."""
        process = ForkedPopen(command, env, **options)
        self._pids[int(env["RANK"])] = process.pid
        return process

    def __enter__(self) -> Kills:
        self._thread = threading.Thread(target=self._kill_at_random)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()

    def _kill_at_random(self) -> None:
        begin = time.monotonic()
        self._wait(lambda: self._checkpoints() > 0, LIMIT)
        while not self._over.is_set() and self.kinds.total() < self.limit:
            if self.rng.random() < 0.3:
                self._wait(lambda: any(self.run.glob("checkpoints/*.partial/run.pt")), 5.0)
                ranks, kind = [min(self._pids)], "leader in a commit"
            else:
                self._over.wait(self.rng.uniform(0.05, 1.5))
                count = self.rng.choice([1, 1, 1, 2, 4])
                ranks, kind = self.rng.sample(sorted(self._pids), count), {1: "one", 2: "two", 4: "all"}[count]
            if self._over.is_set():
                break
            done, killed = self._checkpoints(), time.monotonic()
            if not sum(self._kill(rank) for rank in ranks):
                continue
            self.kinds[kind] += 1
            if self._wait(lambda: self._checkpoints() > done, LIMIT) and not self._over.is_set():  # noqa: B023
                self.recovered.append(time.monotonic() - killed)
        while not self._over.wait(1.0):
            if time.monotonic() - begin > LIMIT:
                self.hangs = True
                for rank in self._pids:
                    self._kill(rank)
                os.kill(os.getpid(), signal.SIGTERM)  # ends `launch`
                return

    def _kill(self, rank: int) -> bool:
        with suppress(ProcessLookupError):
            os.kill(self._pids[rank], signal.SIGKILL)
            return True
        return False

    def _checkpoints(self) -> int:
        """Returns the number of updates of the newest checkpoint."""
        names = [path.name for path in self.run.glob("checkpoints/checkpoint-*") if path.suffix != ".partial"]
        return int(max(names, default="0").removeprefix("checkpoint-"))

    def _wait(self, ready: object, seconds: float) -> bool:
        assert callable(ready)
        end = time.monotonic() + seconds
        while not self._over.is_set() and time.monotonic() < end:
            if ready():
                return True
            time.sleep(0.002)
        return bool(ready())


def run(strategy: str, egs_dir: Path, out: Path, seed: int, kills: int) -> tuple[Kills, str]:
    """Trains once under random kills. Returns the kills, and the verdict, `ok: ...` or `FAILED: ...`."""
    rng = random.Random(f"{strategy} {seed}")
    killer = Kills(out, rng, kills)
    command = [sys.executable, "-m", "tests.support.fault_worker_main", strategy, str(egs_dir), str(out)]
    shim = SimpleNamespace(Popen=killer.start_process, TimeoutExpired=subprocess.TimeoutExpired)
    with mock.patch.object(worker_process, "subprocess", shim):
        try:
            with killer:
                launch(
                    [*command, "[]", str(EPOCHS)], 4, synchronous=False, restart_after=RESTART_AFTER,
                    max_restarts=1000,
                )  # fmt: skip
            history = audit(out)
        except (InputError, SystemExit) as error:
            return killer, f"FAILED: {'hangs' if killer.hangs else error}"
    return killer, f"{'FAILED' if history.problems else 'ok'}: {history}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak.sh --processes", description="Random kills of real processes.")
    parser.add_argument("kills", type=int, nargs="?", default=20, help="kills per strategy (default: 20)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first run (default: 0)")
    parser.add_argument("--strategy", choices=STRATEGIES, help="test only this strategy")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s.%(msecs)03d %(message)s", datefmt="%H:%M:%S")
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        egs_dir = write_examples(Path(folder) / "egs", frames_U=(60,) * 12)
        for strategy in [arguments.strategy] if arguments.strategy else STRATEGIES:
            kinds, recovered, seed, verdicts = Counter[str](), list[float](), arguments.first, Counter[str]()
            while kinds.total() < arguments.kills:
                out = Path(folder) / f"{strategy}-{seed}"
                killer, verdict = run(strategy, egs_dir, out, seed, arguments.kills - kinds.total())
                print(f"{strategy} seed {seed}: {killer.kinds.total()} kills, {verdict}", flush=True)
                kinds += killer.kinds
                recovered += killer.recovered
                verdicts[verdict.partition(":")[0]] += 1
                seed += 1
            failed = failed or verdicts["FAILED"] > 0
            seconds = (
                f"median {statistics.median(recovered):.1f} s, longest {max(recovered):.1f} s" if recovered else "-"
            )
            print(
                f"{strategy}: {kinds.total()} kills ({', '.join(f'{n} {kind}' for kind, n in sorted(kinds.items()))}), "
                f"{verdicts['ok']} runs without a problem, {verdicts['FAILED']} failed; to recover: {seconds}",
                flush=True,
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
