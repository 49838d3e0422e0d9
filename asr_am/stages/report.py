"""Stage 10, report: exp/<corpus>/RESULTS.md and plots in exp/<corpus>/report, from what the other stages left."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from asr_am.stages.app import ROOT, corpus_dir, stage
from asr_am.stages.unit import DONE, Unit


def units(cfg: DictConfig) -> list[Unit]:
    """One unit, made again when any finished run is new or changed."""
    root = corpus_dir(cfg)
    finished = sorted(path.parent for part in ("score", "train") for path in root.glob(f"{part}/*/{DONE}"))
    recipe = f"recipes/{cfg.corpus.name}/run.sh"
    command = recipe if (ROOT / recipe).exists() else f"recipes/kaldi/run.sh --name {cfg.corpus.name} ..."
    return [Unit(root / "report", finished, {"command": command}, partial(write, root, command))]


def write(root: Path, command: str, out: Path) -> None:
    """Tables and plots."""
    from asr_am.report.write import write_report

    write_report(root, out, command)


main = stage("report", units)

if __name__ == "__main__":
    main()
