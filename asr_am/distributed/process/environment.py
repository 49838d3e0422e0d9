"""Who this process is: what `plan.learner_environment`, torchrun or Slurm have put into its environment."""

from __future__ import annotations

import ctypes
import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from asr_am.distributed.process.key import check_key
from asr_am.errors import InputError

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Environment:
    """local_size: learners on each host. supervisor: tcp://host:port, None for a gang, which has `master`: host and
    port of torch's store. hosted: torchrun serves that store itself. restarts: of the gang, by torchrun. run: 32
    hexadecimal digits, None where the gang has to agree on some. launcher: its process. key: for encryption.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    incarnation: int
    run: str | None
    supervisor: str | None
    master: tuple[str, int] | None
    hosted: bool
    restarts: int
    launcher: int | None
    key: str | None

    @property
    def hosts(self) -> tuple[int, ...]:
        """Of each rank: launchers fill one host after the other."""
        return tuple(rank // self.local_size for rank in range(self.size))

    @classmethod
    def read(cls, variables: Mapping[str, str] = os.environ) -> Environment:
        """InputError naming the variable that is missing or wrong."""
        if "RANK" not in variables:
            raise InputError("RANK is not in the environment; start learners with launcher=process, torchrun or Slurm")
        size = _whole(variables, "WORLD_SIZE", least=1)
        rank = _whole(variables, "RANK")
        if rank >= size:
            raise InputError(f"RANK={rank}: with WORLD_SIZE={size}, ranks are 0 to {size - 1}")
        supervisor = variables.get("ASR_AM_SUPERVISOR")
        run, master = variables.get("ASR_AM_RUN"), None
        if (run is not None or supervisor is not None) and not re.fullmatch("[0-9a-f]{32}", run or ""):
            raise InputError(f"ASR_AM_RUN={run!r} in the environment: must be 32 hexadecimal digits")
        if supervisor is None:
            if not variables.get("MASTER_ADDR"):
                raise InputError("MASTER_ADDR is not in the environment: the host of learner 0")
            master = variables["MASTER_ADDR"], _whole(variables, "MASTER_PORT", least=1, most=65535)
        return cls(
            rank=rank,
            size=size,
            local_rank=_whole(variables, "LOCAL_RANK", default="0"),
            local_size=_whole(variables, "LOCAL_WORLD_SIZE", default=str(size), least=1),
            incarnation=_whole(variables, "ASR_AM_INCARNATION", default="0"),
            run=run,
            supervisor=supervisor,
            master=master,
            hosted=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            restarts=_whole(variables, "TORCHELASTIC_RESTART_COUNT", default="0"),
            launcher=_whole(variables, "ASR_AM_LAUNCHER") if "ASR_AM_LAUNCHER" in variables else None,
            key=check_key(variables["ASR_AM_KEY"], "ASR_AM_KEY") if "ASR_AM_KEY" in variables else None,
        )


def _whole(variables: Mapping[str, str], name: str, *, default: str = "", least: int = 0, most: int = 1 << 31) -> int:
    text = variables.get(name, default)
    if not text.isdecimal() or not least <= int(text) <= most:
        raise InputError(f"{name}={text!r} in the environment: must be a whole number, {least} to {most}")
    return int(text)


def die_with(launcher: int) -> None:
    """Let the kernel end this process with its parent, if that is the launcher (Linux)."""
    if os.getppid() != launcher:
        return  # there is something in between, such as a shell
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        raise InputError("the launcher has ended")
