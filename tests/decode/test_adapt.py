"""Adaptation without transcripts gives transforms near those estimated with transcripts."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from asr_am.decode import adapt as module
from asr_am.decode import loading
from asr_am.decode.adapt import (
    ADAPTATION_FILE,
    AdaptationPaths,
    AdaptOptions,
    adapt_set,
    load_adaptation,
    save_adaptation,
)
from asr_am.decode.graph import build_hclg
from asr_am.decode.search import SearchOptions
from asr_am.errors import InputError
from asr_am.features.adapted import read_transforms
from asr_am.hmm.adaptation import FmllrOptions
from asr_am.hmm.gmm import DiagGmms
from asr_am.hmm.gmm_system import TRANSFORMS, UNADAPTED, GmmSystem
from asr_am.lang.prepare import prepare_lm
from asr_am.options import build
from asr_am.stages.layout import Layout
from asr_am.stages.speaker import adapt as adapt_stage
from tests.support.gmm_training import train_systems
from tests.support.synthetic_speech import Spoken

OPTIONS = AdaptOptions(
    passes=2, first_beam=8.0, lm_weight=10.0, search=SearchOptions(beam=10.0, lattice_beam=4.0),
    fmllr=FmllrOptions(min_frames=200),
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Spoken]]:
    return train_systems(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def paths(trained: tuple[Path, dict[str, Spoken]]) -> AdaptationPaths:
    root, sets = trained
    for name in ("lm", "graph", "data/lm"):
        (root / name).mkdir()
    sentences = [" ".join(words) for words in sets["train"].text.values()]
    (root / "data/lm/train.txt").write_text("".join(f"{sentence}\n" for sentence in sentences))
    prepare_lm(root / "data", root / "lang", root / "lm", name="lm", order=2, arpa=None, text="train")
    system = GmmSystem.load(root / "align/sat")
    build_hclg(root / "lang", root / "lm", system.states, system.tree, root / "graph")
    return AdaptationPaths(root / "align/sat", root / "features", root / "lang", root / "graph/HCLG.fst", root / "work")


def distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.linalg.norm(one - other))


def test_unknown_speech_gets_nearly_the_transforms_of_known_speech(paths: AdaptationPaths) -> None:
    """Adapts the training speakers without using their transcripts."""
    known = read_transforms(paths.system / TRANSFORMS, "train")
    found = adapt_set(paths, "train", OPTIONS, 1)
    assert sorted(found) == sorted(known) == ["spk0", "spk1"]
    for speaker, other in (("spk0", "spk1"), ("spk1", "spk0")):
        assert distance(found[speaker], known[speaker]) < 0.5 * distance(found[speaker], known[other])


def test_dev_is_adapted_with_its_own_graph(paths: AdaptationPaths, tmp_path: Path) -> None:
    root, system = paths.graph.parents[1], GmmSystem.load(paths.system)
    for name in ("lm", "graph", "out"):
        (tmp_path / name).mkdir()
    prepare_lm(root / "data", root / "lang", tmp_path / "lm", name="lm", order=1, arpa=None, text="train")
    build_hclg(root / "lang", tmp_path / "lm", system.states, system.tree, tmp_path / "graph")
    options = asdict(OPTIONS) | {"lm": None, "sets": ["dev"]}
    adapt_stage(Layout(root), paths.graph.parent, tmp_path / "graph", options, 1, tmp_path / "out")
    found = read_transforms(tmp_path / "out", "dev")
    expected = adapt_set(replace(paths, graph=tmp_path / "graph/HCLG.fst", work=tmp_path / "work"), "dev", OPTIONS, 1)
    for speaker, transform in adapt_set(paths, "dev", OPTIONS, 1).items():
        assert np.array_equal(found[speaker], expected[speaker]) and not np.array_equal(found[speaker], transform)


def test_a_killed_run_goes_on_from_its_lattices(
    paths: AdaptationPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = replace(paths, work=tmp_path)
    estimates = module.adapt_speakers
    titles = []

    def killed_at_the_second(*given: object, **named: object) -> dict[str, np.ndarray]:
        titles.append(given[4])
        if len(titles) == 2:
            raise KeyboardInterrupt
        return estimates(*given, **named)  # type: ignore[arg-type]

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "adapt_speakers", killed_at_the_second)
        adapt_set(copy, "dev", OPTIONS, 1)
    made = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.lat")}
    assert {path.parent.name for path in made} == {"dev_1", "dev_2"}
    resumed = adapt_set(copy, "dev", OPTIONS, 1)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.lat")} == made
    expected = adapt_set(paths, "dev", OPTIONS, 1)
    for speaker in expected:
        np.testing.assert_array_equal(resumed[speaker], expected[speaker])


def test_models_are_loaded_once_for_all_sets_and_passes(
    paths: AdaptationPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs in one process, like the adaptation of the two channels of a call."""
    for loader in (loading.load_graph, loading.load_gmms, loading.load_lang, loading.load_states, module._load_models):
        loader.cache_clear()
    read, graphs = loading.read_hclg, []
    monkeypatch.setattr(loading, "read_hclg", lambda path: (graphs.append(path), read(path))[1])
    load, mixtures = DiagGmms.load, []
    monkeypatch.setattr(DiagGmms, "load", lambda path: (mixtures.append(path.name), load(path))[1])
    for number in range(2):
        adapt_set(replace(paths, work=tmp_path / f"{number}"), "dev", OPTIONS, 1)
    assert graphs == [paths.graph] and sorted(mixtures) == ["gmm.npz", UNADAPTED]


def test_a_system_without_unadapted_mixtures_is_refused(paths: AdaptationPaths, tmp_path: Path) -> None:
    for path in paths.system.iterdir():
        if path.name != UNADAPTED:
            (tmp_path / path.name).symlink_to(path)
    with pytest.raises(InputError, match=r"unadapted\.npz"):
        adapt_set(replace(paths, system=tmp_path), "dev", OPTIONS, 1)


def test_how_it_was_done_is_noted_for_later_speakers(paths: AdaptationPaths, tmp_path: Path) -> None:
    """They may be adapted on a host without a GPU."""
    folder = tmp_path / "features/fmllr"
    folder.mkdir(parents=True)
    save_adaptation(folder, paths, replace(OPTIONS, fmllr=replace(OPTIONS.fmllr, device="cuda")))
    found, options = load_adaptation(folder)
    assert options == OPTIONS and found == replace(paths, features_dir=tmp_path / "features", work=folder)
    text = (folder / ADAPTATION_FILE).read_text()
    for damaged in ("", text[:-20], text.replace("passes", "passers"), text.replace("system", "sistem"), "[]"):
        (folder / ADAPTATION_FILE).write_text(damaged)
        with pytest.raises(
            InputError, match=rf"{ADAPTATION_FILE}: missing or damaged .*; run stage 4 \(speaker\) again"
        ):
            load_adaptation(folder)


@pytest.mark.parametrize("unusable", [None, "wide"])
def test_beams_weights_and_passes_must_be_numbers(unusable: object) -> None:
    for name in ("first_beam", "lm_weight", "passes"):
        with pytest.raises(InputError, match=rf"^speaker\.{name}={unusable}: must be"):
            build(AdaptOptions, {**vars(OPTIONS), name: unusable}, "speaker")
    with pytest.raises(InputError, match=rf"^speaker\.search\.beam={unusable}: must be"):
        build(SearchOptions, {**vars(OPTIONS.search), "beam": unusable}, "speaker.search")


@pytest.mark.parametrize("unusable", [0, -1])
def test_beams_weights_and_passes_must_be_above_zero(unusable: int) -> None:
    for name in ("first_beam", "lm_weight", "passes"):
        with pytest.raises(InputError, match=f"speaker: {name} is {unusable!r}"):
            replace(OPTIONS, **{name: unusable})
    with pytest.raises(InputError, match=f"search: beam is {unusable!r}"):
        replace(OPTIONS.search, beam=unusable)


def test_the_first_pass_has_limits_of_its_own() -> None:
    options = replace(OPTIONS, first_max_active=300)
    first, second = options.search_options(1), options.search_options(2)
    assert (first.beam, first.max_active) == (OPTIONS.first_beam, 300)
    assert (second.beam, second.max_active) == (OPTIONS.search.beam, OPTIONS.search.max_active)
    with pytest.raises(InputError, match="search: max_active is 200; it must be above min_active"):
        replace(OPTIONS, first_max_active=200)
