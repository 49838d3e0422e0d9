"""On every host but the first: starts learners when the supervisor says so, and tells it how they end."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterator
from functools import partial

import zmq

from asr_am.distributed.leases import LearnerLost
from asr_am.distributed.process.children import Children
from asr_am.distributed.process.plan import Meeting, Plan, learner_environment
from asr_am.distributed.process.server import Message, read_json
from asr_am.distributed.process.sockets import PATIENCE, open_socket
from asr_am.errors import InputError

log = logging.getLogger(__name__)

TURN = 0.05  # seconds between two looks at the processes


class Agent:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = open_socket(self._context, zmq.DEALER, plan.key)
        self._socket.connect(f"tcp://{plan.address}")
        self._children: Children | None = None

    def run(self) -> None:
        """Until the supervisor says that it is over. LearnerLost, InputError: what ended the run."""
        try:
            meeting = self._report_for_duty()
            self._children = Children(self._plan.command, partial(learner_environment, self._plan, meeting))
            heard, said = time.monotonic(), 0.0
            while True:
                for message in self._receive(TURN):
                    heard = time.monotonic()
                    if message.get("do") == "start":
                        self._children.start(message["rank"], message["incarnation"])
                    elif message.get("do") == "stop":
                        self._stop(message)
                        return
                for child in self._children.ended():
                    self._send({"op": "ended", **vars(child)})
                if time.monotonic() - heard > PATIENCE:
                    raise InputError(f"the supervisor at {self._plan.address} cannot be reached any more")
                if time.monotonic() - said > PATIENCE / 5:
                    said = time.monotonic()
                    self._send({"op": "live"})
        finally:
            if self._children is not None:
                self._children.end()
            self._socket.close(linger=500)
            self._context.term()

    def _report_for_duty(self) -> Meeting:
        """Tell the supervisor of this host, and hear from it when all hosts are there."""
        plan = self._plan
        self._send({
            "op": "node", "node": plan.node_rank, "nodes": plan.nodes, "learners": plan.learners,
            "in_step": plan.in_step, "host": socket.gethostname(),
        })  # fmt: skip
        for message in self._receive(plan.timeout):
            if message.get("do") == "run":
                master = message["master"]
                return Meeting(message["run"], message["supervisor"], (master[0], master[1]) if master else None)
            self._stop(message)
        raise InputError(
            f"address={plan.address}: nobody answers within {plan.timeout:g} s; is the same command with node_rank=0 "
            "running there, with the same key_file?"
        )

    def _stop(self, message: Message) -> None:
        if message.get("lost") is not None:
            raise LearnerLost(message["lost"], message["error"])
        if message.get("error"):
            raise InputError(message["error"])

    def _receive(self, seconds: float) -> Iterator[Message]:
        """What comes within that time, and all that is there then. What the caller does not take stays for the next."""
        wait = int(1000 * seconds)
        while self._socket.poll(wait):
            wait = 0
            message = read_json(self._socket.recv_multipart())
            if message is not None:
                yield message

    def _send(self, message: Message) -> None:
        self._socket.send(json.dumps(message).encode())
