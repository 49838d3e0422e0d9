"""The secret that closes a run's mail and supervision to strangers, the same file on every host of the run.

`python -m asr_am.distributed.process.key FILE` makes one.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
from pathlib import Path

import zmq

from asr_am.errors import InputError

HOW = "python -m asr_am.distributed.process.key FILE"


def make_key_file(path: Path) -> None:
    """A new secret, which only its owner can read. InputError where there is a file already: it may be in use."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise InputError(f"{path}: cannot be made ({error.strerror}); give the name of a new file") from error
    with os.fdopen(descriptor, "w") as file:
        file.write(new_key() + "\n")


def read_key_file(path: Path) -> str:
    """The secret in a file. InputError where there is none, and where others than the file's owner have access."""
    try:
        with path.open(encoding="ascii") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            key = file.read(64).strip()
    except OSError as error:
        raise InputError(f"key_file={path}: cannot be read ({error.strerror}); make one with {HOW}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"key_file={path}: holds no key; make a new file with {HOW}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InputError(
            f"key_file={path}: others have access to it (mode {mode:03o}); chmod 600 {path}, or, where somebody may "
            f"have read it, make a new one with {HOW}"
        )
    return check_key(key, f"key_file={path}")


def choose_key(key_file: str | None, encrypt: bool | None, *, loopback: bool, one_start: bool) -> str | None:
    """The secret of a run; None: not encrypted.

    encrypt: None for all that leaves this machine, but not for what stays on the loopback device. one_start: all
    processes are started from here, and can be handed a new secret where there is no file.
    """
    if encrypt is False and key_file is not None:
        raise InputError(f"encrypt=false, but key_file={key_file}: give one of them")
    if key_file is not None:
        return read_key_file(Path(key_file))
    if encrypt or (encrypt is None and not loopback):
        if one_start:
            return new_key()
        raise InputError(
            f"launcher.key_file: is missing; make a file with {HOW} and give it on all hosts, or, in a network where "
            "you trust everybody, launcher.encrypt=false"
        )
    return None


def new_key() -> str:
    return zmq.curve_keypair()[1].decode()


def check_key(key: str, what: str) -> str:
    """InputError naming `what` unless the key can be used: a CURVE secret key, 40 characters of Z85."""
    try:
        zmq.curve_public(key.encode())
    except (ValueError, zmq.ZMQError) as error:
        raise InputError(f"{what}: holds no key; make a new file with {HOW}") from error
    return key


def is_loopback(host: str) -> bool:
    """Whether a host's name or IPv4 address leads to this machine only; not where it is unknown."""
    try:
        return socket.gethostbyname(host).startswith("127.")
    except OSError:
        return False


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(f"usage: {HOW}")
    try:
        make_key_file(Path(sys.argv[1]))
    except InputError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
