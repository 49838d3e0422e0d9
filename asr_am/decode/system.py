"""`system.json`: a decoding run that can be used again, on other sets or on a user's recordings."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from asr_am.data.textfile import load_json, write_lines
from asr_am.decode.lattice import LmScale
from asr_am.decode.loading import load_network
from asr_am.decode.scorer import GmmSource, MeanSource, NeuralSource, ScoreSource, Window
from asr_am.decode.search import SearchOptions
from asr_am.errors import InputError

FORMAT = "asr_am system 1"
FILE = "system.json"
PATHS = ("align_dir", "features_dir", "lang_dir", "graph_dir", "dev_graph_dir", "model")
OPTIONAL = ("dev_graph_dir", "model")  # of these, those that may be null


@dataclass(frozen=True)
class System:
    """Acoustic model, decoding graph, and the scales chosen on dev.

    Attributes:
        align_dir: holds states.npz, and gmm.npz for a GMM system.
        graph_dir: holds HCLG.fst.
        feature_kind: the features that the acoustic model takes, e.g. "fmllr+logmel".
        model: checkpoint of a network, or None for the Gaussian mixtures of `align_dir`.
        window: how the network is applied (ignored for mixtures).
        others: further networks for the same features and states, each with its window. Scores are the mean of all.
        dev_graph_dir: holds the graph for dev, as the LM of the other one knows it. None: the same.
        before_dev: the networks before they were trained on dev, too, to decode dev with. Empty if they were not.
    """

    align_dir: Path
    features_dir: Path
    lang_dir: Path
    graph_dir: Path
    feature_kind: str
    model: Path | None = None
    window: Window = field(default_factory=lambda: Window(0, 0))
    others: tuple[tuple[Path, Window], ...] = ()
    search: SearchOptions = field(default_factory=SearchOptions)
    lm_scale: LmScale = field(default_factory=lambda: LmScale(10.0))
    dev_graph_dir: Path | None = None
    before_dev: tuple[Path, ...] = ()

    @property
    def graph(self) -> Path:
        return self.graph_dir / "HCLG.fst"

    @property
    def network(self) -> str | None:
        """The name of the network's training run, None for mixtures."""
        return self.model.parent.name if self.model else None

    @property
    def networks(self) -> list[tuple[Path, Window]]:
        """All networks, each with its window."""
        return [(self.model, self.window), *self.others] if self.model else []

    def of(self, subset: str) -> System:
        """Returns the system that decodes a set."""
        return self.on_dev if subset == "dev" else self

    @property
    def on_dev(self) -> System:
        """The system that decodes dev: with a graph and with networks that have not seen it."""
        models = self.before_dev or [model for model, _ in self.networks]
        networks = [(model, window) for model, (_, window) in zip(models, self.networks, strict=True)]
        return replace(
            self, graph_dir=self.dev_graph_dir or self.graph_dir, model=networks[0][0] if networks else None,
            others=tuple(networks[1:]), dev_graph_dir=None, before_dev=(),
        )  # fmt: skip

    @property
    def states(self) -> Path:
        return self.align_dir / "states.npz"

    def source(self, subset: str) -> ScoreSource:
        """Returns the source of the acoustic scores of one set."""
        if self.model is None:
            return GmmSource(self.align_dir, self.features_dir, subset)
        sources = tuple(NeuralSource(model, self.features_dir, subset, window) for model, window in self.networks)
        return MeanSource(sources) if self.others else sources[0]

    def save(self, folder: Path) -> None:
        """Writes system.json into `folder`, with relative paths so that a whole experiment can be moved."""
        paths = {name: getattr(self, name) for name in PATHS}
        value: dict[str, object] = {"format": FORMAT}
        value |= {name: None if path is None else os.path.relpath(path, folder) for name, path in paths.items()}
        value |= {"feature_kind": self.feature_kind, "window": str(self.window)}
        value["others"] = [[os.path.relpath(model, folder), str(window)] for model, window in self.others]
        value["before_dev"] = [os.path.relpath(model, folder) for model in self.before_dev]
        value |= {"search": vars(self.search), "weights": self.lm_scale._asdict()}
        write_lines(folder / FILE, [json.dumps(value, indent=1)])

    @classmethod
    def load(cls, folder: Path) -> System:
        """Reads a run's system.json. Raises InputError if it is damaged, or it or a file that it names is missing."""
        path = folder / FILE
        if not path.is_file():
            raise InputError(
                f"{path}: no such file; give a finished decoding run, exp/<corpus>/decode/<run> (run stage 7 (decode))"
            )
        try:
            value = load_json(path)
            if value.pop("format") != FORMAT:
                raise ValueError("unknown format")
            for name in PATHS:
                missing = name in OPTIONAL and value.get(name) is None
                value[name] = None if missing else Path(os.path.normpath(folder / value[name]))
            value |= {"window": Window.parse(value["window"]), "search": SearchOptions(**value["search"])}
            value |= {"lm_scale": LmScale(**value.pop("weights"))}
            others = [(os.path.normpath(folder / path), window) for path, window in value.get("others", ())]
            value["others"] = tuple((Path(path), Window.parse(window)) for path, window in others)
            before = [os.path.normpath(folder / path) for path in value.get("before_dev", ())]
            value["before_dev"] = tuple(map(Path, before))
            system = cls(**value)
            if system.before_dev and len(system.before_dev) != len(system.networks):
                raise ValueError("before_dev has another number of networks")
            if not all(isinstance(number, int | float) for number in system.lm_scale) or not system.lm_scale.lm > 0:
                raise ValueError(f"weights {system.lm_scale}")
        except (InputError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{path}: not the record of a decoding run ({error}); run stage 7 (decode) again"
            ) from error
        networks = [model for model, _ in system.networks]
        for needed in (system.states, system.graph, system.lang_dir, system.features_dir, *networks):
            if needed is not None and not os.path.exists(needed):  # False for an impossible name, too
                raise InputError(f"{needed}: is missing, but {path} needs it; run the stage that makes it again")
        return system


def feature_kind_of(align_dir: Path, model: Path | None) -> str:
    """Reads the kind of features that an acoustic model takes: of the network `model`, else of the GMM system."""
    if model is not None:
        return str(load_network(model)[1]["kind"])
    from asr_am.hmm.gmm_system import GmmSystem

    return GmmSystem.kind(align_dir)
