"""`system.json`: a decoding run as something that can be used again, on other sets or on a user's recording."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from asr_am.data.textfile import write_lines
from asr_am.decode.lattice import LmScale
from asr_am.decode.scorer import GmmSource, NeuralSource, ScoreSource, Window
from asr_am.decode.search import SearchOptions
from asr_am.errors import InputError

FORMAT = "asr_am system 1"
FILE = "system.json"
PATHS = ("align_dir", "features_dir", "lang_dir", "graph_dir", "model")


@dataclass(frozen=True)
class System:
    """Acoustic model, graph and the weights chosen on dev.

    align_dir: states.npz (and gmm.npz). model: a network's checkpoint; None: the Gaussian mixtures of align_dir.
    graph_dir: HCLG.fst. window: how the network is applied (of no account for mixtures).
    """

    align_dir: Path
    features_dir: Path
    lang_dir: Path
    graph_dir: Path
    model: Path | None = None
    window: Window = field(default_factory=lambda: Window(0, 0))
    search: SearchOptions = field(default_factory=SearchOptions)
    weights: LmScale = field(default_factory=lambda: LmScale(10.0))

    @property
    def graph(self) -> Path:
        return self.graph_dir / "HCLG.fst"

    @property
    def states(self) -> Path:
        return self.align_dir / "states.npz"

    def source(self, subset: str) -> ScoreSource:
        """The scores of one set."""
        if self.model is None:
            return GmmSource(self.align_dir, self.features_dir, subset)
        return NeuralSource(self.model, self.features_dir, subset, self.window)

    def kind(self) -> str:
        """The kind of features the model takes."""
        if self.model is None:
            from asr_am.hmm.gmm_system import GmmSystem

            return GmmSystem.kind(self.align_dir)
        from asr_am.model.model_file import load_acoustic_model

        return str(load_acoustic_model(self.model)[1]["kind"])

    def save(self, folder: Path) -> None:
        """Write system.json into `folder`, paths relative to it: an experiment can be moved as a whole."""
        paths = {name: getattr(self, name) for name in PATHS}
        value: dict[str, object] = {"format": FORMAT}
        value |= {name: None if path is None else os.path.relpath(path, folder) for name, path in paths.items()}
        value |= {"window": str(self.window), "search": vars(self.search), "weights": self.weights._asdict()}
        write_lines(folder / FILE, [json.dumps(value, indent=1)])

    @classmethod
    def load(cls, folder: Path) -> System:
        """Read the system.json of a decoding run; InputError where it is missing, damaged or points nowhere."""
        path = folder / FILE
        if not path.is_file():
            raise InputError(
                f"{path}: no such file; give a finished decoding run, exp/<corpus>/decode/<run> (run stage 7 (decode))"
            )
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            if value.pop("format") != FORMAT:
                raise ValueError("unknown format")
            for name in PATHS:
                value[name] = None if value[name] is None else Path(os.path.normpath(folder / value[name]))
            value |= {"window": Window.parse(value["window"]), "search": SearchOptions(**value["search"])}
            system = cls(**value | {"weights": LmScale(**value["weights"])})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{path}: not the record of a decoding run ({error}); run stage 7 (decode) again"
            ) from error
        for needed in (system.states, system.graph, system.lang_dir, system.features_dir, system.model):
            if needed is not None and not needed.exists():
                raise InputError(f"{needed}: is missing, but {path} needs it; run the stage that makes it again")
        return system
