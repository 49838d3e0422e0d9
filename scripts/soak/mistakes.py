"""Makes the mistakes of a first hour on purpose, on a small finished run, and writes exp/mistakes/MISTAKES.md.

    python -m scripts.soak.mistakes                       # all of them, about 20 minutes on two cores
    python -m scripts.soak.mistakes --only "full disk"    # those whose group or description has this pattern, again

For each mistake the table has the command, the line that came, the exit status, and how many finished files changed.
Rows that break a rule are marked with !: a traceback, more than one line on stderr, another exit status than expected,
or a finished file that is lost or changed. Exits with 1 if there is such a row. Mounting disks needs root.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from asr_am.stages.target import git_commit
from scripts.soak.mistake_cases import (
    CORPUS,
    EXP,
    GROUPS,
    OWN,
    OWN_PRISTINE,
    PRISTINE,
    ROOT,
    RUN,
    WORK,
    Mistake,
    disks,
    nothing,
    remove,
)  # fmt: skip
from scripts.soak.results import record
from tests.support.kaldi_corpus import LEXICON, write_kaldi_dir

SECTION = "Mistakes on purpose"
LONG = 9  # lines


@dataclass(frozen=True)
class Row:
    """What came of a mistake.

    Attributes:
        group: heading of the table.
        line: what it wrote to stderr.
        changed: number of finished files that were lost or changed.
        problems: rules that it breaks.
    """

    group: str
    what: str
    command: str
    status: int
    line: str
    changed: int
    problems: list[str]
    commit: str


def fingerprints(folder: Path) -> dict[str, tuple[int, int]]:
    """Returns size and time of each file of the finished outputs below a folder, by its path."""
    found = {}
    for done in (path for path in folder.rglob(".done") if path.stat().st_size):
        for path in done.parent.rglob("*"):
            if path.is_file():
                found[str(path)] = (path.stat().st_size, path.stat().st_mtime_ns)
    return found


def finished() -> dict[str, tuple[int, int]]:
    """Returns what `fingerprints` returned for the finished run at its place."""
    return {path.replace(str(PRISTINE), str(EXP), 1): value for path, value in fingerprints(PRISTINE).items()}


def restore() -> None:
    """Makes the folder of the finished run as it was, at the same place, since keys have paths in them."""
    for source, target in ((PRISTINE, EXP), (OWN_PRISTINE, OWN)):
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target, symlinks=True)


def run(command: Sequence[str], cwd: Path = ROOT) -> tuple[int, str]:
    """Runs a command. Returns its exit status and what it wrote to stderr."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=900)
    return done.returncode, done.stderr.strip()


def run_and_signal(mistake: Mistake) -> tuple[int, str]:
    """Runs a command, and sends it a signal when the first stage has begun to write."""
    process = subprocess.Popen(
        mistake.command, cwd=mistake.cwd, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    begun = [f"{CORPUS / name}{end}" for name in mistake.removes for end in (".partial", "/*.partial", "/*/.key")]
    deadline = time.monotonic() + 600
    while process.poll() is None and not any(list(Path().glob(path)) for path in begun):
        assert time.monotonic() < deadline, f"{mistake.what}: the stage has not begun"
        time.sleep(0.005)
    time.sleep(0.2)
    if mistake.signal == signal.SIGINT:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    else:
        assert mistake.signal is not None
        os.kill(process.pid, mistake.signal)
    _, errors = process.communicate(timeout=300)
    deadline = time.monotonic() + 120
    while subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True).stdout:  # the stage ends after bash
        assert time.monotonic() < deadline, f"{mistake.what}: processes are left"
        time.sleep(0.05)
    status = process.returncode
    return status if status >= 0 else 128 - status, errors.strip()  # bash itself dies of SIGTERM


def make(mistake: Mistake) -> Row:
    """Makes a mistake on the finished run and returns what came of it."""
    if mistake.prepare is not nothing or mistake.removes or fingerprints(EXP) != finished():
        restore()
    for name in mistake.removes:
        remove(CORPUS / name)
    mistake.prepare()
    before = fingerprints(EXP)
    status, errors = run_and_signal(mistake) if mistake.signal else run(mistake.command, mistake.cwd)
    if mistake.undo:
        mistake.undo()
    after = fingerprints(EXP)
    changed = sum(after.get(path) != digest for path, digest in before.items() if "/log/" not in path)
    lines = errors.splitlines()
    problems = []
    if "Traceback" in errors and not mistake.command[0].endswith("torchrun"):  # which always ends with its own
        problems.append("traceback")
    if (len(lines) > 1 and not mistake.warns) or (not lines and mistake.status):
        problems.append(f"{len(lines)} lines")
    if status != mistake.status:
        problems.append(f"exit status {status} instead of {mistake.status}")
    if not re.search(mistake.expect, errors):
        problems.append(f"not the expected line: {mistake.expect}")
    if changed:
        problems.append("finished files changed")
    if mistake.undo or mistake.signal:
        again, more = run(mistake.command, mistake.cwd)
        if again:
            problems.append(f"the same command does not go on: {more.splitlines()[-1:]}")
    shown = lines if len(lines) < LONG else [lines[0], "...", *lines[-2:]]
    command, line = shlex.join(mistake.command), " / ".join(shown).replace(f"{ROOT}/", "")
    return Row(mistake.group, mistake.what, command, status, line, changed, problems, git_commit())


# The table


def prepare() -> None:
    """Makes the finished run, and a small Kaldi directory."""
    if not (PRISTINE / "minicts/RESULTS.md").exists():
        shutil.rmtree(WORK, ignore_errors=True)
        WORK.mkdir(parents=True)
        subprocess.run(RUN, check=True)
        shutil.copytree(EXP, PRISTINE, symlinks=True)
    shutil.rmtree(OWN_PRISTINE, ignore_errors=True)
    write_kaldi_dir(OWN_PRISTINE / "train", "a", speakers=10)
    write_kaldi_dir(OWN_PRISTINE / "test", "b")
    (OWN_PRISTINE / "lexicon.txt").write_text(LEXICON)
    (OWN_PRISTINE / "train/segments").write_text(
        "".join(f"a{i}-{j} a{i}-{j} 0 1\n" for i in range(10) for j in range(3))
    )
    for part in ("train", "test"):  # wav.scp names the copy
        scp = OWN_PRISTINE / part / "wav.scp"
        scp.write_text(scp.read_text().replace(str(OWN_PRISTINE), str(OWN)))


def table(rows: Sequence[Row]) -> str:
    """Returns the rows as Markdown, a table for each group."""
    commits = ", ".join(f"{commit} ({n} rows)" for commit, n in Counter(row.commit for row in rows).items())
    bad = sum(bool(row.problems) for row in rows)
    lines = [
        "# Mistakes on purpose", "",
        "Made by `python -m scripts.soak.mistakes`, on a small finished run of `recipes/minicts`, at commit "
        f"{commits}, until {datetime.date.today()}. {len(rows)} mistakes, {bad} of them with a problem (!). The last "
        "column counts the files of finished outputs that were lost or changed.",
    ]  # fmt: skip
    for group in dict.fromkeys(row.group for row in rows):
        lines += ["", f"## {group}", "", "| | mistake | exit | what came | files lost |", "|:--|:--|--:|:--|--:|"]
        for row in rows:
            if row.group == group:
                cells = [f"`{cell}`" if cell else "" for cell in (row.what, row.line.replace("|", "\\|"))]
                mark = "! " + "; ".join(row.problems) if row.problems else ""
                lines.append(f"| {mark} | {cells[0]} | {row.status} | {cells[1]} | {row.changed} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Makes the mistakes. Returns 1 if one of them has a problem."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression of a group or a description")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    prepare()
    saved = WORK / "rows.json"
    rows = {(row["group"], row["what"]): Row(**row) for row in json.loads(saved.read_text())} if saved.exists() else {}
    known = []
    for mistakes in GROUPS:
        for mistake in mistakes():
            known.append((mistake.group, mistake.what))
            if not re.search(arguments.only, f"{mistake.group}: {mistake.what}", re.IGNORECASE):
                continue
            if mistakes is disks and os.geteuid():
                print(f"skipped, since mounting a disk needs root: {mistake.group}, {mistake.what}")
                continue
            try:
                row = rows[known[-1]] = make(mistake)
            finally:
                if mistakes is disks:
                    subprocess.run(["umount", "-l", str(EXP)], capture_output=True)
            mark = "! " if row.problems else ""
            print(f"{mark}{row.group}: {row.what}: {row.status}: {row.line}", *row.problems, sep="\n    ", flush=True)
            saved.write_text(json.dumps([asdict(row) for row in rows.values()], indent=1))
    found = [rows[name] for name in known if name in rows]
    (WORK / "MISTAKES.md").write_text(table(found), encoding="utf-8")
    problems = sum(bool(row.problems) for row in found)
    record(SECTION, "all", {"mistakes": len(found), "with a problem": problems})
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(main())
