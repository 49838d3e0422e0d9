"""Stage 10, report: exp/<corpus>/RESULTS.md and plots in exp/<corpus>/report, from what the other stages left."""

from __future__ import annotations

import shlex
import sys
from functools import partial
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from asr_am.stages.app import ROOT, corpus_dir, stage
from asr_am.stages.target import Target

SHOWN = "score/*/*.json", "train/*/summary.json", "rescore/*/rescore.json", "lm/*/lm.json", "data/corpus.json"
LEFT_OUT = ("corpus", "nj", "data_dir", "logger", "run")  # overrides that the figures do not depend on


def units(cfg: DictConfig) -> list[Target]:
    """One unit, made again when anything that it shows is new or changed."""
    root = corpus_dir(cfg)
    shown = sorted(path for pattern in SHOWN for path in root.glob(pattern))
    command = command_line(cfg.corpus.name)
    work = partial(write, root, command)
    return [Target(root / "report", shown, {"command": command}, work, extra_outputs=[root / "RESULTS.md"])]


def command_line(corpus: str) -> str:
    """The command that makes these results, as far as this stage was told of it: of a sweep all, not one job's part."""
    recipe = f"recipes/{corpus}/run.sh"
    if not (ROOT / recipe).exists():
        return f"recipes/kaldi/run.sh --name {corpus} ..."
    given = [word for word in sys.argv[1:] if "=" in word and word[0] != "-"] if HydraConfig.initialized() else []
    return shlex.join([recipe, *(override for override in given if override.split("=")[0] not in LEFT_OUT)])


def write(root: Path, command: str, out: Path) -> None:
    """Tables and plots."""
    from asr_am.report.write import write_report

    write_report(root, out, command)


main = stage("report", units)

if __name__ == "__main__":
    main()
