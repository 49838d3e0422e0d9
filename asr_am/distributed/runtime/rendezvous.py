"""How the learners of a gang find each other: through torch's TCPStore, each step within a bounded time."""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from asr_am.distributed.runtime.worker_process import WorkerEnv
from asr_am.errors import InputError

Result = TypeVar("Result")


class Rendezvous:
    """timeout: seconds from now on for everybody to come."""

    def __init__(self, env: WorkerEnv, timeout: float) -> None:
        assert env.master is not None
        self._env, self._timeout = env, timeout
        self._name = f"MASTER_ADDR={env.master[0]} MASTER_PORT={env.master[1]}"
        self._deadline = time.monotonic() + timeout
        serves = env.rank == 0 and not env.agent_store
        if not serves:
            self._await_listener(env.master)
        self.store: Store = PrefixStore(f"asr_am/{env.restarts}", self._open(env.master, serves))

    def within(self, function: Callable[[], Result], what: str) -> Result:
        """`function()`, given up at the deadline: torch does not always keep to the timeouts that it is given."""
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
        """The run's identity, from learner 0."""
        if self._env.run is not None:
            return bytes.fromhex(self._env.run)
        with self._store_errors():
            if self._env.rank == 0:
                self.store.set("run", secrets.token_hex(16))
            self._await(["run"], lambda missing: "learner 0 has not come")
            return bytes.fromhex(self.store.get("run").decode())

    def exchange(self, address: str) -> dict[int, str]:
        """Everybody's mail address, by rank. InputError where learners disagree, come twice, or do not come."""
        rank, size = self._env.rank, self._env.size
        keys = [f"learner/{other}" for other in range(size)]
        with self._store_errors():
            if self.store.add(f"times/{rank}", 1) > 1:
                raise InputError(f"RANK={rank} was given to two processes")
            self.store.set(keys[rank], json.dumps([size, address]))
            self._await(keys, lambda missing: (
                f"learners {', '.join(key.split('/')[1] for key in missing)} of WORLD_SIZE={size} have not come"
            ))  # fmt: skip
            peer_info: list[list[Any]] = [json.loads(self.store.get(key)) for key in keys]
        for other, (theirs, _) in enumerate(peer_info):
            if theirs != size:
                raise InputError(
                    f"WORLD_SIZE={size} at learner {rank}, but {theirs} at learner {other}; give all the same"
                )
        return {other: address for other, (_, address) in enumerate(peer_info)}

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except DistError as error:
            raise InputError(f"{self._name}: learner 0 has gone before all had come; see its message") from error

    def _open(self, master: tuple[str, int], serves: bool) -> Store:
        def connect() -> Store:
            return TCPStore(
                master[0], master[1], None, serves, timedelta(seconds=self._timeout), wait_for_workers=False,
                master_listen_fd=_listen(master) if serves else None,
            )  # fmt: skip

        try:
            return self.within(connect, "connecting to torch's store")
        except (DistError, OSError) as error:
            if serves:
                raise InputError(
                    f"{self._name}: cannot be listened on ({_first_line(error)}); is it this host, and the port free?"
                ) from error
            raise InputError(f"{self._name}: no connection to torch's store there ({_first_line(error)})") from error

    def _await_listener(self, master: tuple[str, int]) -> None:
        """Until somebody listens at the master's port."""
        while True:
            try:
                socket.create_connection(master, timeout=max(self._left(), 0.1)).close()
                return
            except OSError as error:
                if self._left() <= 0:
                    raise InputError(
                        f"{self._name}: does not answer within {self._timeout:g} s ({error}); is learner 0 started "
                        "there, and the port open?"
                    ) from error
                time.sleep(0.1)

    def _await(self, keys: Sequence[str], describe: Callable[[Sequence[str]], str]) -> None:
        missing = list(keys)
        while missing := [key for key in missing if not self.store.check([key])]:
            if self._left() <= 0:
                raise InputError(f"{self._name}: {describe(missing)} within {self._timeout:g} s")
            time.sleep(0.05)

    def _left(self) -> float:
        return self._deadline - time.monotonic()


def _listen(master: tuple[str, int]) -> int | None:
    """The descriptor of a socket that only this host reaches, where no other is to come; torch's store would listen on
    all of the host's addresses. A name may lead others elsewhere than this host.
    """
    host = master[0]
    return socket.create_server(master).detach() if host == "localhost" or host.startswith("127.") else None


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
