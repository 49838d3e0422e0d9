"""torch's store with a signature on every entry.

torch's TCPStore accepts everyone who connects. With a key that only the learners have, what another process writes is
an error: the addresses of learners, of gloo and of NCCL. Entries stay readable, and counters (`add`) have no signature:
who changes or deletes one can stop a run. Somebody may have kept entries of an earlier run with the same key, and may
listen at the addresses in them. `sign_for` excludes these.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store

from asr_am.errors import InputError

DIGEST = "sha256"
SIZE = 32  # bytes of a signature


class SignedStore(Store):
    """Signs what this process writes and checks what it reads."""

    def __init__(self, store: Store, key: str) -> None:
        super().__init__()
        self._store, self._key = store, key.encode()

    def sign_for(self, nonces: Sequence[str]) -> None:
        """From now on accepts only what is signed by learners that know the same nonces.

        Args:
            nonces: a random text of each learner, by rank, the own one not read from the store.
        """
        self._key = hmac.digest(self._key, " ".join(nonces).encode(), DIGEST)

    def set(self, name: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(name, data + self._sign(name, data))  # type: ignore[arg-type]

    def get(self, name: str) -> bytes:
        """Returns an entry. Raises InputError if it has no signature or a wrong one."""
        entry = bytes(self._store.get(name))
        data, signature = entry[:-SIZE], entry[-SIZE:]
        if not hmac.compare_digest(signature, self._sign(name, data)):
            raise InputError(
                f"torch's store: the entry {name!r} was not written by a learner with this run's key: give all hosts "
                "the same key_file, and keep others from MASTER_PORT"
            )
        return data

    def add(self, name: str, amount: int) -> int:
        return self._store.add(name, amount)

    def check(self, names: Sequence[str]) -> bool:
        return self._store.check(list(names))

    def wait(self, names: Sequence[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._store.wait(list(names))
        else:
            self._store.wait(list(names), timeout)

    def delete_key(self, name: str) -> bool:
        return self._store.delete_key(name)

    def num_keys(self) -> int:
        return self._store.num_keys()

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        return self._store.timeout  # type: ignore[attr-defined,no-any-return]

    def _sign(self, name: str, data: bytes) -> bytes:
        return hmac.digest(self._key, len(name).to_bytes(4, "little") + name.encode() + data, DIGEST)
