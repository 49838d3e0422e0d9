"""Encrypted ZeroMQ sockets: the run's secret key, socket options, local addresses, and rejected connections.

All processes of a run share one secret. `python -m asr_am.distributed.runtime.security FILE` creates a key file, which
must be copied to every host of the run.
"""

from __future__ import annotations

import argparse
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

from asr_am import disk
from asr_am.distributed.launch_spec import HEARTBEAT_TIMEOUT
from asr_am.errors import InputError

KEYGEN_CMD = "python -m asr_am.distributed.runtime.security FILE"


def make_key_file(path: Path) -> None:
    """Creates a key file that only its owner can read. Raises InputError if the file exists: it may be in use."""
    try:
        disk.write_private(path, new_key() + "\n")
    except OSError as error:
        raise InputError(f"{path}: cannot be created ({error.strerror}): give the name of a new file") from error


def read_key_file(path: Path) -> str:
    """Returns the secret in a file. Raises InputError if there is none, or if other users have access to the file."""
    try:
        with path.open(encoding="ascii") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            key = file.read(64).strip()
    except OSError as error:
        raise InputError(f"key_file={path}: cannot be read ({error.strerror}): create one with {KEYGEN_CMD}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"key_file={path}: is not a key file: create a new one with {KEYGEN_CMD}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InputError(
            f"key_file={path}: other users have access to it (mode {mode:03o}): chmod 600 {path}, or, if anyone may "
            f"have read it, create a new one with {KEYGEN_CMD}"
        )
    return check_key(key, f"key_file={path}")


def choose_key(key_file: str | None, encrypt: bool | None, *, private: bool, one_start: bool) -> str | None:
    """Returns the secret of a run, or None if connections are not encrypted.

    Args:
        encrypt: encrypt connections. None encrypts all except those in a private directory.
        private: all connections are sockets in a directory that no other user can enter.
        one_start: all processes are started by this one, which can give them a new secret without a file.

    Raises:
        InputError: the options contradict each other, or a key file is needed.
    """
    if encrypt is False and key_file is not None:
        raise InputError(f"encrypt=false, but key_file={key_file}: give only one of them")
    if key_file is not None:
        return read_key_file(Path(key_file))
    if encrypt or (encrypt is None and not private):
        if one_start:
            return new_key()
        raise InputError(
            f"launcher.key_file is missing: create a file with {KEYGEN_CMD} and give it on all hosts, or set "
            "launcher.encrypt=false if you trust everyone in the network"
        )
    return None


def new_key() -> str:
    return zmq.curve_keypair()[1].decode()


def check_key(key: str, what: str) -> str:
    """Returns the key. Raises InputError naming `what` unless it is a CURVE secret key, 40 characters of Z85."""
    try:
        zmq.curve_public(key.encode())
    except (ValueError, zmq.ZMQError) as error:
        raise InputError(f"{what}: is not a key file: create a new one with {KEYGEN_CMD}") from error
    return key


def is_loopback(host: str) -> bool:
    """Returns whether a host name or IPv4 address is a loopback address. False if it is unknown."""
    try:
        return socket.gethostbyname(host).startswith("127.")
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(prog=KEYGEN_CMD.removesuffix(" FILE"), description="Make the secret key of a run.")
    parser.add_argument("file", type=Path, metavar="FILE", help="a new file, which every host of the run needs")
    try:
        make_key_file(parser.parse_args().file)
    except InputError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()


HANDSHAKE_TIMEOUT = 10.0  # seconds after which a connection ends that has not authenticated itself
FRAME_BYTES = 1 << 20  # largest frame of a message
MAX_FRAME_BYTES = FRAME_BYTES + 64  # with encryption. Limits what a connection can send before it is authenticated
SIOCGIFADDR = 0x8915  # Linux: IPv4 address of an interface


def open_socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, key: str | None, *, heartbeats: bool = True
) -> zmq.Socket[bytes]:
    """Returns a socket with the options of this project, encrypted (CURVE) if there is a key.

    Both ends use the same key pair, whose public half is never sent in clear text. Without the secret the handshake
    fails. Each connection has session keys of its own and numbers its messages, so replayed ones are rejected.

    Args:
        kind: zmq.ROUTER for sockets to bind, zmq.DEALER for sockets to connect.
        key: the run's secret, 40 characters of Z85, or None.
        heartbeats: close connections whose other end does not answer. Those with heartbeats of their own stay open, so
            that no message is lost while a process is stopped.
    """
    zmq_socket = context.socket(kind)
    zmq_socket.setsockopt(zmq.LINGER, 0)
    zmq_socket.setsockopt(zmq.HANDSHAKE_IVL, int(1000 * HANDSHAKE_TIMEOUT))
    if heartbeats:
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
    """Returns a monitor of a socket's connection. See `next_event`."""
    return zmq_socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)


def next_event(monitor: zmq.Socket[bytes]) -> int | None:
    """Returns EVENT_HANDSHAKE_SUCCEEDED, EVENT_DISCONNECTED, or None if there are no more events."""
    try:
        return int(recv_monitor_message(monitor, zmq.NOBLOCK)["event"])
    except zmq.Again:
        return None


def address_towards(host: str, port: int) -> str:
    """Returns this machine's IPv4 address on the route to `host`. Raises InputError if the host is unknown."""
    try:
        target = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_DGRAM)[0][4]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise InputError(f"{host}:{port}: cannot be reached ({error}): check the host name and the network") from error


def interface_of(address: str) -> str | None:
    """Returns the name of the network interface with this IPv4 address, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # the interface has no address
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None


def split_address(text: str, what: str) -> tuple[str, int]:
    """Splits `host:port`. Raises InputError naming `what` if it is malformed."""
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
        raise InputError(f"{what}={text!r}: must be host:port, such as node0:29400")
    return host, int(port)


log = logging.getLogger(__name__)

MAX_EVENTS_PER_TURN = 1000  # so that a flood of connections delays nothing else


class ConnectionMonitor:
    """Counts connections and messages that a listening socket rejects: unauthorized, replayed or malformed ones.

    Logs the first rejection and the final count only, so that an attacker cannot fill the disk. Must be created before
    the socket is bound, and used in the socket's thread.

    ZeroMQ reports a wrong key, a wrong cipher and a replayed message, and closes the connection. After a greeting of an
    older protocol, or none, it reports only that the connection is closed. It identifies accepted and closed
    connections by file descriptor, but does not say whose handshake succeeded. A connection that is closed while
    handshakes are open therefore counts as rejected, even one of this run that breaks during another's handshake. A
    client that disconnects during the handshake was not rejected.

    Args:
        name: owner of the socket, for messages.
        on_reject: called at each rejection.

    Attributes:
        rejected: number of rejected connections and messages.
        monitor: ZeroMQ socket with the events.
    """

    def __init__(self, zmq_socket: zmq.Socket[bytes], name: str, on_reject: Callable[[], None] | None = None) -> None:
        self._socket, self._name, self._on_reject = zmq_socket, name, on_reject
        self.rejected = 0
        self.monitor = zmq_socket.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_DISCONNECTED
        )  # fmt: skip
        self._open: set[int] = set()  # descriptors of accepted connections
        self._handshakes = 0  # successful handshakes among them
        self._reported = False  # ZeroMQ has given the reason why the next connection closes

    def poll(self) -> None:
        """Handles the events since the last call, up to a limit."""
        for _ in range(MAX_EVENTS_PER_TURN):
            try:
                event = recv_monitor_message(self.monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            kind, descriptor = event["event"], event["value"]
            if kind == zmq.EVENT_ACCEPTED:
                self._open.add(descriptor)
            elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._handshakes += 1
            elif kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self._reported = True
                self.reject("a connection with a wrong key or none, or with a replayed message")
            elif kind == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._reported = True
            else:
                if descriptor in self._open and not self._reported:
                    self.reject("a connection without a valid greeting")
                self._open.discard(descriptor)
                self._reported = False
            if self._handshakes >= len(self._open):
                self._open.clear()
                self._handshakes = 0

    def reject(self, what: str) -> None:
        self.rejected += 1
        if self.rejected == 1:
            log.warning("%s rejected %s; further rejections are only counted", self._name, what)
        if self._on_reject is not None:
            self._on_reject()

    def close(self) -> None:
        """Logs the count. Must be called before the socket is closed."""
        self.poll()
        if self.rejected > 1:
            log.warning("%s rejected %d connections and messages in total", self._name, self.rejected)
        self._socket.disable_monitor()
        self.monitor.close(linger=0)
