"""Measures the machines of a launcher, and writes conf/cluster/<name>.yaml and conf/workload/<name>.yaml.

    python -m asr_am.cluster measure name=mine launcher=process learners=4
    ... learners=8 launcher.nodes=2 launcher.address=HOST0:29500 launcher.key_file=team.key launcher.node_rank=0

With several hosts, run it on each of them as for a training. Host 0 writes the files.

Every constant is a median of some trials, with the least and the most beside it. All learners do what is measured at
the same time, as in training they share links and cores, too: links carry a message of each learner in both
directions. Messages and weights are as large as the model. The speed that computing keeps beside a collective is that
of matrix products.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from omegaconf import DictConfig

from asr_am import disk
from asr_am.errors import InputError
from asr_am.stages.plan import model_bytes, training_speed
from asr_am.stages.recipe_files import CONF
from asr_am.stages.sections import LaunchOptions

log = logging.getLogger(__name__)

PIECES = 16  # of a message: more change hardly any time
MADE = "# made by python -m asr_am.cluster measure"


def measure(cfg: DictConfig, name: str) -> None:
    """Measures, and writes the two files.

    Raises:
        InputError: there are fewer than two learners, or a file of that name is somebody else's.
    """
    if cfg.launcher.name != "process" or cfg.learners < 2:
        raise InputError("cluster measure: give launcher=process and learners=, those of all hosts, at least 2")
    paths = [CONF / kind / f"{name}.yaml" for kind in ("cluster", "workload")]
    for path in paths:
        if path.exists() and not path.read_text(encoding="utf-8").startswith(MADE):
            raise InputError(f"{path}: was not made by this command; choose another name=")
    elements = max(1, round((cfg.workload.bytes or model_bytes(cfg)) / 4))
    found: dict[str, Any] = {}
    for kind, synchronous in (("collectives", True), ("messages", False)):
        found |= run_job(cfg, synchronous, {"kind": kind, "elements": elements}) or {}
    if not found:
        return  # this is not host 0
    for path, text in zip(paths, describe(name, found, 4.0 * elements, training_speed(cfg)), strict=True):
        disk.replace(path, lambda file, text=text: file.write(text.encode()))  # type: ignore[misc]
        log.info("wrote %s", path)
        print(f"{path}:\n{text}")


def run_job(cfg: DictConfig, synchronous: bool, job: Mapping[str, Any]) -> dict[str, Any] | None:
    """Has the learners of `cfg` do a job of asr_am.cluster.learner. Returns its result, None on hosts other than 0."""
    from asr_am.distributed.runtime.launcher import launch

    options = LaunchOptions.parse(cfg.launcher)
    with TemporaryDirectory(prefix="asr_am.cluster.") as folder:
        path, out = Path(folder) / "job.json", Path(folder) / "result.json"
        path.write_text(json.dumps({**job, "out": str(out)}), encoding="utf-8")
        command = [sys.executable, "-m", "asr_am.cluster.learner", str(path)]
        launch(command, cfg.learners // options.nodes, synchronous=synchronous, **options.of_launch())
        return json.loads(out.read_text(encoding="utf-8")) if out.exists() else None


def describe(name: str, found: Mapping[str, Any], size: float, speed: float) -> tuple[str, str]:
    """Returns the text of both files, for a model of `size` bytes with `speed` training frames a second on one core."""
    hosts: list[int] = found["hosts"]
    per_host, several = hosts.count(0), max(hosts) > 0
    sent = {"host": size, "nic": per_host * size}  # through a link at a time
    links = {link: _link(found[link], count) for link, count in sent.items() if link in found}
    host = links.get("host") or links["nic"]
    nic = links.get("nic") or host
    ring = 2 * (len(hosts) - 1) / len(hosts)
    bandwidth = median((nic if several else host)[1])
    short = median(found["short_all_reduce"])
    efficiency = [ring * size / max(seconds - short, seconds / 2) / bandwidth for seconds in found["all_reduce"]]
    kept = [min(1.0, speed / median(found["computing"])) for speed in found["beside"]] or [1.0]
    logs = [math.log(speed) for speed in found["computing"]]
    jitter = math.sqrt(sum((x - sum(logs) / len(logs)) ** 2 for x in logs) / (len(logs) - 1))
    where = "[measured]" if several else "[assumed] as inside the host, there is no other:"
    lines = [
        f"{MADE}. Median (least to most) of trials, units as in ibm_a.yaml.",
        f"name: {name}",
        f"hosts: {max(hosts) + 1}",
        f"devices_per_host: {per_host}",
        "device: cpu",
        _line("nic_bandwidth", nic[1], where),
        _line("nic_latency", nic[0], where),
        f"message_pieces: {PIECES}  # [assumed] connections of TCP share a network card",
        _line("host_bandwidth", host[1]),
        _line("host_latency", host[0]),
        _line("collective_latency", [seconds / (2 * (len(hosts) - 1)) for seconds in found["short_all_reduce"]]),
        _line("all_reduce_efficiency", efficiency),
        _line("overlap_speed", kept),
        _line("update_bandwidth", [size / seconds for seconds in found["update"]]),
        _line("averaging_bandwidth", [per_host * size / seconds for seconds in found["averaging"]]),
        _line("factoring_bandwidth", [size / seconds for seconds in found["factoring"]]),
        f"jitter: {jitter:.3g}  # [measured] sigma of {len(logs)} equal computations of one learner",
        "faults: {slow: null, crashes: [], late_share: 0.0, late_seconds: 0.0, lost_share: 0.0}",
    ]
    workload = [
        f"{MADE}. The trained model itself.",
        f"name: {name}",
        "bytes: null",
        "seconds_per_batch: null",
        f"frames_per_second: {{cpu: {_number(speed)}}}  # [measured] training on one core",
        "emulate: false",
    ]
    return "\n".join(lines) + "\n", "\n".join(workload) + "\n"


def _link(trials: Mapping[str, Sequence[float]], size: float) -> tuple[list[float], list[float]]:
    """Returns latencies of short messages, and bandwidths of large ones.

    Where a large message takes hardly longer than a short one, half of its time is taken for the transfer.
    """
    latency = median(trials["latency"])
    return list(trials["latency"]), [size / max(seconds - latency, seconds / 2) for seconds in trials["seconds"]]


def _line(key: str, trials: Sequence[float], how: str = "[measured]") -> str:
    return f"{key}: {_number(median(trials))}  # {how} {min(trials):.3g} to {max(trials):.3g}"


def _number(value: float) -> str:
    """Returns four digits, with the point that YAML 1.1 wants before an exponent."""
    text = f"{value:.4g}"
    return text if "." in text else text.replace("e", ".0e")
