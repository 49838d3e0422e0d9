"""Rendezvous of synchronous learners through torch's store, each step with a timeout.

On one host the store is a file in a private directory. With torchrun, learner 0 makes the directory and the others find
its path in torch's TCPStore. On several hosts the store is the TCPStore, whose entries are signed with the run's key.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch.distributed import DistError, FileStore, PrefixStore, Store, TCPStore

from asr_am.distributed.runtime.private_dir import check_private_dir, make_private_dir
from asr_am.distributed.runtime.signed_store import SignedStore
from asr_am.distributed.runtime.worker_process import WorkerEnv
from asr_am.errors import ConnectionLost, InputError

Result = TypeVar("Result")


class PeerInfo(NamedTuple):
    """What a learner tells the others when it connects.

    Attributes:
        address: address of its transport.
        gpu: see `gpu_placement.gpu_name`.
    """

    address: str
    gpu: str | None


class Rendezvous:
    """Connects to the store of a run.

    Args:
        timeout: seconds in which all learners must connect.

    Attributes:
        private_dir: directory for the sockets of a team on one host. None on several hosts.
        made_dir: `private_dir` if this process has made it, and has to remove it.
        store: torch's store.
    """

    def __init__(self, env: WorkerEnv, timeout: float) -> None:
        self._env, self._timeout = env, timeout
        self._deadline = time.monotonic() + timeout
        self.private_dir = env.private_dir
        self.made_dir: Path | None = None
        if env.private_dir is None:
            assert env.master is not None
            self._name = f"MASTER_ADDR={env.master[0]} MASTER_PORT={env.master[1]}"
            self.store = self._open_tcp(env.master)
            if env.one_host:
                self._tcp_store = self.store  # learner 0 serves it until the others have read the path
                self.private_dir = self._agree_on_dir()
        if self.private_dir is not None:
            check_private_dir(self.private_dir)
            self._name = f"{self.private_dir}/store-{env.incarnation}"
            Path(self._name).touch()  # torch would look for a missing file once a second
            self.store = PrefixStore("asr_am", FileStore(self._name))

    def within(self, function: Callable[[], Result], what: str) -> Result:
        """Returns `function()`. Raises InputError at the deadline, as torch does not always respect its timeouts."""
        results: list[Result] = []
        errors: list[BaseException] = []

        def attempt() -> None:
            try:
                results.append(function())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=attempt, name="rendezvous", daemon=True)
        thread.start()
        thread.join(self._left())
        if errors:
            raise errors[0]
        if not results:
            raise InputError(f"{self._name}: {what} did not succeed within {self._timeout:g} s")
        return results[0]

    def agree_on_run(self) -> bytes:
        """Returns the identity of the run, 16 bytes, which learner 0 chooses."""
        if self._env.run is not None:
            return bytes.fromhex(self._env.run)
        return bytes.fromhex(self._from_learner_0("run", lambda: secrets.token_hex(16)))

    def exchange(self, address: str, gpu: str | None) -> dict[int, PeerInfo]:
        """Returns what each learner has told the others, by rank.

        Raises:
            InputError: learners are missing, have different WORLD_SIZE, or share a rank.
        """
        self._check_in()
        rank, keys = self._env.rank, [f"address/{other}" for other in range(self._env.size)]
        with self._store_errors():
            self.store.set(keys[rank], json.dumps([address, gpu]))
            self._await(keys)
            return {other: PeerInfo(*json.loads(self.store.get(key))) for other, key in enumerate(keys)}

    def _check_in(self) -> None:
        """Waits for all learners. What they sign after this counts for this start only."""
        rank, size = self._env.rank, self._env.size
        keys = [f"learner/{other}" for other in range(size)]
        nonce = secrets.token_hex(16)
        with self._store_errors():
            if self.store.add(f"times/{rank}", 1) > 1:
                raise InputError(
                    f"RANK={rank} was given to two processes: start each learner once, with a rank of its own"
                )
            self.store.set(keys[rank], json.dumps([size, nonce]))
            self._await(keys)
            told: list[list[Any]] = [json.loads(self.store.get(key)) for key in keys]
        for other, (other_size, _) in enumerate(told):
            if other_size != size:
                raise InputError(
                    f"WORLD_SIZE={size} at learner {rank}, but {other_size} at learner {other}: they must be equal"
                )
        if isinstance(self.store, SignedStore):
            self.store.sign_for([nonce if other == rank else text for other, (_, text) in enumerate(told)])

    def _agree_on_dir(self) -> Path:
        """Returns the private directory that learner 0 makes."""

        def make() -> str:
            self.made_dir = make_private_dir()
            return str(self.made_dir)

        return Path(self._from_learner_0("private_dir", make))

    def _from_learner_0(self, key: str, make: Callable[[], str]) -> str:
        """Returns the entry that learner 0 makes."""
        with self._store_errors():
            if self._env.rank == 0:
                self.store.set(key, make())
            self._await([key])
            return self.store.get(key).decode()

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except DistError as error:
            raise ConnectionLost(
                f"{self._name}: learner 0 ended before all learners had connected: see its message"
            ) from error

    def _open_tcp(self, master: tuple[str, int]) -> Store:
        serves = self._env.rank == 0 and not self._env.agent_store
        if not serves:
            self._await_listener(master)

        def connect() -> Store:
            return TCPStore(
                master[0], master[1], None, serves, timedelta(seconds=self._timeout), wait_for_workers=False,
                master_listen_fd=_listen(master) if serves else None,
            )  # fmt: skip

        try:
            store = self.within(connect, "connecting to torch's store")
            store = PrefixStore(f"asr_am/{self._env.restarts + self._env.incarnation}", store)
            return store if self._env.key is None else SignedStore(store, self._env.key)
        except (DistError, OSError) as error:
            if serves:
                raise InputError(
                    f"cannot bind {self._name} ({_first_line(error)}): check that MASTER_ADDR is this host and the "
                    "port is free"
                ) from error
            raise InputError(f"{self._name}: cannot connect to torch's store ({_first_line(error)})") from error

    def _await_listener(self, master: tuple[str, int]) -> None:
        """Waits until the port of the store is open."""
        while True:
            try:
                socket.create_connection(master, timeout=max(self._left(), 0.1)).close()
                return
            except OSError as error:
                if self._left() <= 0:
                    raise InputError(
                        f"{self._name}: does not answer within {self._timeout:g} s ({error}): check that learner 0 "
                        "runs there and the port is open"
                    ) from error
                time.sleep(0.1)

    def _await(self, keys: Sequence[str]) -> None:
        """Waits for entries. Those of several learners have names that end with their ranks."""
        missing = list(keys)
        while missing := [key for key in missing if not self.store.check([key])]:
            if self._left() <= 0:
                late = "learner 0 has not connected"
                if len(keys) > 1:
                    ranks = ", ".join(key.split("/")[1] for key in missing)
                    late = f"learners {ranks} of WORLD_SIZE={self._env.size} have not connected"
                raise InputError(f"{self._name}: {late} within {self._timeout:g} s")
            time.sleep(0.01)

    def _left(self) -> float:
        return self._deadline - time.monotonic()


def _listen(master: tuple[str, int]) -> int | None:
    """Returns the descriptor of a listening loopback socket, or None if other hosts must connect.

    torch's store would listen on all addresses of the host.
    """
    host = master[0]
    return socket.create_server(master).detach() if host == "localhost" or host.startswith("127.") else None


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
