"""A stage of one target as a program of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
    import time
    from functools import partial
    from pathlib import Path
    from asr_am.errors import InputError
    from asr_am.parallel import parallel_map
    from asr_am.stages.layout import corpus_dir
    from asr_am.stages.app import stage
    from asr_am.stages.target import Target

    def build(out):
        (out.parent / "started").touch()
        {body}

    def targets(cfg):
        return [Target(corpus_dir(cfg) / f"toy-{{cfg.seed}}", [], {{}}, build)]

    stage("toy", targets)()
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}


def start(tmp_path: Path, body: str, *overrides: str) -> subprocess.Popen[str]:
    """Starts the stage with `body` as the work of its target, in a process group of its own."""
    program = tmp_path / "toy.py"
    program.write_text(textwrap.dedent(PROGRAM).format(body=body))
    return subprocess.Popen(
        [sys.executable, str(program), "-m", f"exp={tmp_path}", *overrides], env=ENVIRONMENT, cwd=ROOT, text=True,
        start_new_session=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # else ignored in a background job
    )  # fmt: skip
