"""The secret that closes a run's mail and supervision to strangers, the same file on every host of the run.

`python -m asr_am.distributed.runtime.security FILE` makes one.


ZeroMQ sockets as this project sets them, and which of this machine's addresses others reach it at.

What is refused at a listening socket: strangers' connections, what is replayed, and malformed messages."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import stat
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from asr_am.errors import InputError

KEYGEN_CMD = "python -m asr_am.distributed.runtime.security FILE"


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
        raise InputError(f"key_file={path}: cannot be read ({error.strerror}); make one with {KEYGEN_CMD}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"key_file={path}: holds no key; make a new file with {KEYGEN_CMD}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InputError(
            f"key_file={path}: others have access to it (mode {mode:03o}); chmod 600 {path}, or, where somebody may "
            f"have read it, make a new one with {KEYGEN_CMD}"
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
            f"launcher.key_file: is missing; make a file with {KEYGEN_CMD} and give it on all hosts, or, in a network where "
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
        raise InputError(f"{what}: holds no key; make a new file with {KEYGEN_CMD}") from error
    return key


def is_loopback(host: str) -> bool:
    """Whether a host's name or IPv4 address leads to this machine only; not where it is unknown."""
    try:
        return socket.gethostbyname(host).startswith("127.")
    except OSError:
        return False


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(f"usage: {KEYGEN_CMD}")
    try:
        make_key_file(Path(sys.argv[1]))
    except InputError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()


HEARTBEAT_TIMEOUT = 10.0  # seconds after which a host that does not answer counts as gone
SIOCGIFADDR = 0x8915  # Linux: IPv4 address of an interface


def open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, key: str | None) -> zmq.Socket[bytes]:
    """A ROUTER that can be bound, or a DEALER that can be connected; encrypted (CURVE) if there is a key.

    key: the run's secret, as 40 characters of Z85. It serves both ends: the public half is never sent in clear, so who
    does not have the secret cannot even shake hands. A connection's own keys are made for it alone, and its messages
    numbered: what was recorded is refused when it comes again.
    """
    zmq_socket = context.socket(kind)
    zmq_socket.setsockopt(zmq.LINGER, 0)
    zmq_socket.setsockopt(zmq.HEARTBEAT_IVL, int(1000 * HEARTBEAT_TIMEOUT / 4))
    zmq_socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1000 * HEARTBEAT_TIMEOUT))
    zmq_socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    if key is not None:
        public = zmq.curve_public(key.encode())
        zmq_socket.setsockopt(zmq.CURVE_SECRETKEY, key.encode())
        zmq_socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        if kind == zmq.ROUTER:
            zmq_socket.setsockopt(zmq.CURVE_SERVER, 1)
        else:
            zmq_socket.setsockopt(zmq.CURVE_SERVERKEY, public)
    return zmq_socket


def watch(zmq_socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """A socket that tells when `zmq_socket`'s connection is ready and when it breaks."""
    return zmq_socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)


def next_event(monitor: zmq.Socket[bytes]) -> int | None:
    """EVENT_HANDSHAKE_SUCCEEDED, EVENT_DISCONNECTED, or None where nothing more has happened."""
    try:
        return int(recv_monitor_message(monitor, zmq.NOBLOCK)["event"])
    except zmq.Again:
        return None


def address_towards(host: str, port: int) -> str:
    """This machine's IPv4 address on the way to `host`; InputError for a host that has no address."""
    try:
        target = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_DGRAM)[0][4]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise InputError(
            f"{host}:{port}: cannot be reached ({error}); is the name right, and the network up?"
        ) from error


def interface_of(address: str) -> str | None:
    """The name of the network interface that has an IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None


def split_address(text: str, what: str) -> tuple[str, int]:
    """`host:port` as both; InputError naming `what`."""
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
        raise InputError(f"{what}={text!r}: is host:port, such as node0:29400")
    return host, int(port)


log = logging.getLogger(__name__)


class ConnectionMonitor:
    """Counts them, and logs the first and how many there were in the end: not each, which would let strangers fill the
    disk. Made before the socket is bound; used by the thread that has the socket.

    name: whose socket it is. on_refusal: called for each.

    ZeroMQ tells of a wrong key, a wrong cipher and a message that comes again, and ends the connection; of a greeting
    that is older or none it tells the end alone. It names a connection that was accepted, or has ended, by its file
    descriptor, but does not say whose handshake succeeded. So a connection that is ended while handshakes are open
    counts as refused; one of ours, too, if it breaks while another's is. Who hangs up in the handshake was not refused.
    """

    def __init__(self, zmq_socket: zmq.Socket[bytes], name: str, on_refusal: Callable[[], None] | None = None) -> None:
        self._socket, self._name, self._on_refusal = zmq_socket, name, on_refusal
        self.rejected = 0
        self.monitor = zmq_socket.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_DISCONNECTED
        )  # fmt: skip
        self._open: set[int] = set()  # accepted; of these, `_done` have shaken hands
        self._done = 0
        self._told = False  # why the connection ends that ends next

    def poll(self) -> None:
        """Take note of what has happened to connections."""
        while True:
            try:
                event = recv_monitor_message(self.monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            kind, descriptor = event["event"], event["value"]
            if kind == zmq.EVENT_ACCEPTED:
                self._open.add(descriptor)
            elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._done += 1
            elif kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self._told = True
                self.reject("a connection with a wrong key or none, or with a message that came before")
            elif kind == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._told = True
            else:
                if descriptor in self._open and not self._told:
                    self.reject("a connection that did not begin as this run's do")
                self._open.discard(descriptor)
                self._told = False
            if self._done >= len(self._open):
                self._open.clear()
                self._done = 0

    def reject(self, what: str) -> None:
        self.rejected += 1
        if self.rejected == 1:
            log.warning("%s refused %s; more of the kind are counted only", self._name, what)
        if self._on_refusal is not None:
            self._on_refusal()

    def close(self) -> None:
        """Before the socket is closed."""
        self.poll()
        if self.rejected > 1:
            log.warning("%s refused %d connections and messages in all", self._name, self.rejected)
        self._socket.disable_monitor()
        self.monitor.close(linger=0)
