"""A worker on another host: runs the items that a stage's process sends through its standard input.

    python -m asr_am.jobs.worker SECONDS

A function (`FUNCTION` and its encoding) applies to the lists of items that follow (`ITEMS` and their encoding). Each
list is answered by an encoded tuple: ("results", list) or the kind of an error and its parts. Meanwhile an empty
message goes out every so many seconds, as a sign of life.

Each function has a process of its own, which may cache what it reads: files have changed by the time of the next one.
It is forked, so the modules are imported once. If it is killed, the worker ends.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from asr_am.errors import InputError
from asr_am.jobs.hosts import FUNCTION, READY
from asr_am.jobs.plain import NotPlain, decode, encode
from asr_am.parent_death import signal_on_parent_death
from asr_am.progress import mute

RESULTS, INPUT_ERROR, OS_ERROR, NOT_PLAIN, FAILED = "results", "input error", "os error", "not plain", "failed"


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    mute()
    stage, answers = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    os.dup2(2, 1)  # whatever functions print goes to the log
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.write(answers.fileno(), READY)
    with suppress(EOFError, BrokenPipeError):  # the stage's process has ended
        serve(stage, answers, float(sys.argv[1]))


def serve(stage: Connection, answers: Connection, interval: float) -> None:
    """Answers messages. Raises EOFError when the stage's process has ended, SystemExit if a function's was killed."""
    process: BaseProcess | None = None
    while True:
        kind, content = (message := stage.recv_bytes())[:1], message[1:]
        if kind == FUNCTION:
            if process is not None:
                process.kill()
                process.join()
            process, function = _start(decode(content))
            continue
        function.send_bytes(content)
        while not (ready := wait([function, stage], interval)):
            answers.send_bytes(b"")
        if function not in ready:
            raise EOFError  # the kernel ends the process of the function with this one
        try:
            answer = function.recv_bytes()
        except EOFError:
            sys.exit("the process of a job was killed (out of memory?)")
        answers.send_bytes(answer)


def _start(function: Callable[[Any], Any]) -> tuple[BaseProcess, Connection]:
    """Starts the process of a function. Returns it and the connection to it."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer_all, args=(function, theirs, ours, os.getpid()), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _answer_all(function: Callable[[Any], Any], items: Connection, other_end: Connection, parent: int) -> None:
    other_end.close()
    signal_on_parent_death(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    with suppress(EOFError, BrokenPipeError):  # the worker has ended
        while True:
            items.send_bytes(_answer(function, items.recv_bytes()))


def _answer(function: Callable[[Any], Any], items: bytes) -> bytes:
    """Returns the encoded results of a list of items, or the first error."""
    try:
        return encode((RESULTS, [function(item) for item in decode(items)]))
    except InputError as error:
        return encode((INPUT_ERROR, str(error)))
    except NotPlain as error:
        return encode((NOT_PLAIN, str(error)))
    except OSError as error:
        traceback.print_exc()
        return encode((OS_ERROR, error.errno, error.strerror or str(error), error.filename and str(error.filename)))
    except Exception:
        traceback.print_exc()
        return encode((FAILED, traceback.format_exc()))


if __name__ == "__main__":
    main()
