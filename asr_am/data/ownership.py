"""What this program removes or renames, and when. This page is the whole list, and `disk.remove` does all of it.

Outputs lie in `exp/<corpus>`. An output is a folder with a marker of ours: `.key` from its beginning, and `.done`, with
a list of its files, once it is finished (asr_am/stages/target.py).

- A finished output that was made again from other inputs or values is removed, unless it has a file beyond that list. A
  finished training run is renamed to `<run>.old` instead, and an earlier `<run>.old` is removed.
- `<output>.partial`, what an interrupted stage was making, is emptied when the stage has other inputs or values now.
- An unfinished training run is never removed. A run with other values is made in `<run>.new`, `<run>.new2` and so on.
  When that is finished, it takes the place of an unfinished one, which is renamed to `<run>.unfinished`.
- A training run that ends with a user's mistake before it has written more than its settings is removed.
- `exp/<corpus>/RESULTS.md` and `TABLES.md` are replaced by the next ones, if they begin as ours do.
- Of the checkpoints of a run, the last two are kept.
- Temporary files: `tmp.asr_am.*` in an unfinished output (asr_am/data/temporary.py), archives that were downloaded, and
  the folders `asr_am-*` for sockets in the folder for temporary files, which have a marker of ours.

The folder that `train_model` is given as `out`, and those that `kaldi_export`, `lhotse_export`, `report.compare` and
`papers.psp_figures` write, are marked by `.key` with the command's name. Of the first only old checkpoints are removed.
In the others the next command replaces its files.

Whatever else there is belongs to the user. A folder without a marker is never removed, renamed or written into. Neither
is an output that holds files which it was not made with. Both end with an error that names the file. A command that
writes into a folder of the user's choice refuses one in an output (`refuse_output`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from asr_am.errors import InputError

KEY, DONE = ".key", ".done"
OUTPUT_KEY = re.compile("[0-9a-f]{16}")  # in the `.key` of an output. Other folders have their command's name there
SIGNED = "<!-- made by asr_am, which replaces it -->"  # the first line of a file outside of outputs
LOGS = "log"


def files_in(folder: Path) -> Iterator[str]:
    """Yields the relative name of each file and symbolic link in a folder. Follows no link."""
    for parent, folders, names in os.walk(folder):
        links = [name for name in folders if Path(parent, name).is_symlink()]
        for name in sorted([*names, *links]):
            yield os.path.relpath(os.path.join(parent, name), folder)


def refuse_foreign(folder: Path, ours: Iterable[str], reason: str) -> None:
    """Raises InputError if a folder exists and has a file that is not among `ours`. The message has the `reason`."""
    foreign = sorted(set(files_in(folder)) - set(ours))
    if foreign:
        more = f" and {len(foreign) - 1} more files" if len(foreign) > 1 else ""
        raise InputError(
            f"{folder / foreign[0]}{more}: not made by this program, and {folder} {reason}; move what is yours "
            "elsewhere, then start again"
        )


def begun_key(folder: Path) -> str | None:
    """Returns the key that an output was begun with, from the first line of its `.key`. None without one."""
    path = folder / KEY
    return path.read_text(encoding="utf-8", errors="replace").partition("\n")[0] if path.is_file() else None


def begun_config(folder: Path) -> dict[str, Any]:
    """Returns the values that an output was begun with, from the second line of its `.key`. {} without them."""
    try:
        values = json.loads((folder / KEY).read_text(encoding="utf-8").partition("\n")[2])
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def refuse_output(folder: Path) -> None:
    """Raises InputError if a folder that a command is to write into is the output of a stage, or in one."""
    whole = folder.resolve()
    for output in (whole, *whole.parents):
        try:
            is_output = OUTPUT_KEY.fullmatch(begun_key(output) or "")
        except OSError:  # a .key of somebody else
            continue
        if is_output:
            raise InputError(
                f"{folder}: {output} is the output of a stage, and nothing else is written there; give another folder"
            )


def check_own_dir(folder: Path, command: str) -> None:
    """Raises InputError if the folder for a command's files exists and is not of this command."""
    refuse_output(folder)
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    half_marked = names == [KEY] and not begun_key(folder)  # by a killed process
    if names and begun_key(folder) != command and not half_marked:
        raise InputError(
            f"{folder}: not made by {command}, so nothing is written there; give another folder, or an empty one"
        )


def mark_own_dir(folder: Path, command: str) -> None:
    """Makes a folder as `check_own_dir` allows it, unless it exists."""
    folder.mkdir(parents=True, exist_ok=True)
    if begun_key(folder) != command:
        (folder / KEY).write_text(f"{command}\n", encoding="utf-8")


def refuse_unsigned(path: Path) -> None:
    """Raises InputError if a file that is to be replaced exists and was not made by this program."""
    if path.exists() and not path.read_bytes().startswith(SIGNED.encode()):
        raise InputError(f"{path}: not made by this program, and it is to be replaced; move it elsewhere")


def check_corpus_dir(folder: Path) -> None:
    """Raises InputError if `exp/<corpus>` exists and is no folder of this program.

    It is one if it is empty, if an output is in it, or if it has logs only.
    """
    markers = (f"{depth}{name}" for depth in ("*/", "*/*/", "*/*/*/") for name in (KEY, DONE))
    if folder.is_dir() and not any(any(folder.glob(marker)) for marker in markers):
        foreign = [path for path in sorted(folder.iterdir()) if path.name != LOGS and not path.name.endswith(".lock")]
        if foreign:
            raise InputError(
                f"{folder}: not made by this program (it has {foreign[0].name}), so nothing is written there; choose "
                "another name for the corpus (--name, corpus.name) or another folder with exp=DIR"
            )
