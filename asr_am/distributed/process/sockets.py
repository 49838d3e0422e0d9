"""ZeroMQ sockets as this project sets them, and which of this machine's addresses others reach it at."""

from __future__ import annotations

import fcntl
import socket
import struct

import zmq
from zmq.utils.monitor import recv_monitor_message

from asr_am.errors import InputError

PATIENCE = 10.0  # seconds after which a host that does not answer counts as gone
SIOCGIFADDR = 0x8915  # Linux: IPv4 address of an interface


def open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, key: str | None) -> zmq.Socket[bytes]:
    """A ROUTER that can be bound, or a DEALER that can be connected; encrypted (CURVE) if there is a key.

    key: the run's secret, as 40 characters of Z85. It serves both ends: the public half is never sent in clear, so who
    does not have the secret cannot even shake hands. A connection's own keys are made for it alone, and its messages
    numbered: what was recorded is refused when it comes again.
    """
    zmq_socket = context.socket(kind)
    zmq_socket.setsockopt(zmq.LINGER, 0)
    zmq_socket.setsockopt(zmq.HEARTBEAT_IVL, int(1000 * PATIENCE / 4))
    zmq_socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1000 * PATIENCE))
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
