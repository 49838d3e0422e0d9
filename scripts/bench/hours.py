"""Runs a recipe stage by stage and sets what each stage needed beside the plan that was made before.

    python scripts/bench/hours.py corpus=minicts corpus.hours=100 train.epochs=1 exp=DIR [OVERRIDE ...]

Prints for each stage the core hours, the hours, the disk and the memory of its largest process: predicted by
`asr_am.stages.plan`, and measured. Memory is what processes have for themselves, without pages of mapped files, looked
at every second. The last column is the measured core hours, for 2,000 hours of speech instead of those here. Every
figure goes to DIR/hours.jsonl, so that a command that was interrupted continues with the next stage.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from asr_am.stages.layout import corpus_dir
from asr_am.stages.option_checks import compose_job
from asr_am.stages.plan import Need, plan, training_hours
from asr_am.stages.resolvers import composing

STAGES = ("data", "lang", "features", "align", "speaker", "egs", "train", "decode", "score")
TARGET_HOURS = 2000.0
HEAD = (
    "          |        core hours |             hours |         disk GB |    GB/process | core hours\n"
    "stage     |     plan     here |     plan     here |    plan    here |   plan   here | at 2,000 h"
)


def measure(stage: str, overrides: list[str], folder: Path) -> Need:
    """Runs a stage. Exits with its status if it fails."""
    begin, before = time.monotonic(), disk_usage(folder)
    command = [sys.executable, "-m", f"asr_am.stages.{stage}", *overrides]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
    memory = 0
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        memory = max(memory, own_memory(process.pid))
        time.sleep(1)
    if code := os.waitstatus_to_exitcode(status):
        sys.exit(code)
    hours, core_hours = (time.monotonic() - begin) / 3600, (usage.ru_utime + usage.ru_stime) / 3600
    return Need(stage, core_hours, hours, disk_usage(folder) - before, memory)


def own_memory(session: int) -> int:
    """Returns the bytes of the largest process of a session, without mapped files."""
    largest = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(folder.name)) != session:
                continue
            fields = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        except (OSError, ValueError):  # it has ended meanwhile
            continue
        own = sum(int(fields.get(name, "0 kB").split()[0]) for name in ("RssAnon", "RssShmem"))
        largest = max(largest, 1024 * own)
    return largest


def disk_usage(folder: Path) -> int:
    """Returns the bytes of all files below a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file()) if folder.exists() else 0


def row(plan: Need | None, done: Need, scale: float) -> str:
    """Returns a line of the table."""
    columns = []
    for name, unit, form in (
        ("core_hours", 1, "8.3f"), ("hours", 1, "8.3f"), ("disk", 1e9, "7.2f"), ("memory", 1e9, "6.2f")
    ):  # fmt: skip
        there = f"{getattr(plan, name) / unit:{form}}" if plan else f"{'-':>{form.split('.')[0]}}"
        columns.append(f"{there} {getattr(done, name) / unit:{form}}")
    return f"{done.stage:9} | {' | '.join(columns)} | {done.core_hours * scale:9.1f}"


def of_all(needs: list[Need]) -> Need:
    """Returns the sums over stages, and the memory of the largest process."""
    sums = (sum(getattr(need, name) for need in needs) for name in ("core_hours", "hours", "disk"))
    return Need("all", *sums, memory=max(need.memory for need in needs))


def main() -> None:
    overrides = sys.argv[1:]
    with composing():
        cfg = compose_job(overrides)
    folder, scale = corpus_dir(cfg), TARGET_HOURS / training_hours(cfg)
    log = Path(cfg.exp) / "hours.jsonl"
    log.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    if not lines:  # the prediction comes before the first measurement, and is kept
        lines = [{need.stage: asdict(need) for need in plan(cfg)[0]}]
        log.write_text(json.dumps(lines[0]) + "\n")
    needs = {name: Need(**figures) for name, figures in lines[0].items()}
    measured = [Need(**line) for line in lines[1:]]
    for stage in STAGES[len(measured) :]:
        measured.append(measure(stage, overrides, folder))
        with log.open("a") as file:
            file.write(json.dumps(asdict(measured[-1])) + "\n")
    print(HEAD)
    for done in measured:
        print(row(needs.get(done.stage), done, scale))
    print(row(of_all(list(needs.values())), of_all(measured), scale))
    for path in sorted((folder / "score").glob("*/wer.json")):
        score = json.loads(path.read_text())
        rates = ", ".join(f"{subset} {score[subset]['wer']:.2f} %" for subset in ("all", *cfg.corpus.subsets))
        print(f"{score['system']}, {score['lm']}: word error rate {rates}, {score['all']['words']} words")


if __name__ == "__main__":
    main()
