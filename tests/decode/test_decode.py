"""Stage decode: its files, resuming, and the choice of scales."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from asr_am.decode import shards
from asr_am.decode.ctm import ctm_name
from asr_am.decode.decode_set import decode_sets
from asr_am.decode.dev_choice import DevChoice, choose, read_reference
from asr_am.decode.graph import build_hclg, read_hclg
from asr_am.decode.lattice import LmScale, read_lattices
from asr_am.decode.scorer import Window
from asr_am.decode.system import System
from asr_am.errors import InputError
from asr_am.hmm.states import StateTable
from asr_am.hmm.tree import DecisionTree
from asr_am.lang.lang_dir import Lang
from asr_am.lang.prepare import prepare_lm
from asr_am.stages.decode import decode as decode_stage
from asr_am.stages.layout import Layout
from asr_am.stages.systems import UNTUNED, SystemPlan
from asr_am.transcribe import load_system
from tests.support.decoding_corpus import GRID, OPTIONS, write_network, write_system


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> System:
    return write_system(tmp_path_factory.mktemp("corpus"))


def decode(system: System, out: Path, jobs: int = 1) -> dict[str, bytes]:
    """Runs the decoding and returns every file of it, without timings."""
    out.mkdir(exist_ok=True)
    decode_sets(system, system.lang_dir.parent / "data", out, OPTIONS, jobs=jobs)
    files = {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}
    report = json.loads(files.pop("decode.json"))
    for subset in ("dev", "test"):
        report[subset].pop("real_time_factor")
    return files | {"report": json.dumps(report).encode()}


def test_every_file_is_there_and_agrees_with_the_others(system: System, tmp_path: Path) -> None:
    files = decode(system, tmp_path / "run")
    assert set(files) >= {"system.json", "nbest/dev.txt"} and not any(name.startswith("shards") for name in files)
    ctms = {name.removeprefix("ctm/") for name in files if name.startswith("ctm/")}
    choice = DevChoice.load(tmp_path / "run")
    assert choice.scale == System.load(tmp_path / "run").lm_scale
    assert ctms >= {*(ctm_name("dev", scale) for scale in GRID), ctm_name("test", choice.scale)}
    assert sum(name.startswith("test") for name in ctms) == 1
    reference = read_reference(system.lang_dir.parent / "data", "dev")
    errors = [reference.score(tmp_path / "run/ctm" / ctm_name("dev", scale)).total.errors for scale in GRID]
    assert choice.errors <= min(errors) and choice.errors == json.loads(files["report"])["chosen"]["dev_errors"]
    assert choice.errors == reference.score(tmp_path / "run/ctm" / ctm_name("dev", choice.scale)).total.errors
    lattices = dict(read_lattices(tmp_path / "run" / "lattices" / "dev.ark"))
    assert len(lattices) == 6
    lines = [line.split() for line in files["nbest/dev.txt"].decode().splitlines()]
    assert {line[0] for line in lines} == set(lattices)
    best = {}
    for utterance, graph, acoustic, *words in lines:
        best.setdefault(utterance, (float(graph) + float(acoustic) / 10.0, words))
        assert float(graph) + float(acoustic) / 10.0 >= best[utterance][0] - 1e-3, "n-best lists are sorted"
    in_ctm = [line.split()[4] for line in files["ctm/dev_10_0.ctm"].decode().splitlines()]
    assert sorted(in_ctm) == sorted(word for _, words in best.values() for word in words if word != "<unk>")


def test_jobs_change_nothing(system: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD", 2)
    assert decode(system, tmp_path / "one") == decode(system, tmp_path / "two", jobs=2)


def test_a_killed_run_goes_on(system: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished shards are kept. The shard that was being written is made again."""
    monkeypatch.setattr(shards, "SHARD", 2)
    whole = decode(system, tmp_path / "whole")
    made = []
    real = shards.decode_shard

    def dies(job: shards.Job, shard: tuple[Path, tuple[str, ...]]) -> None:
        if len(made) == 4:
            shard[0].with_suffix(".lat").write_bytes(b"half a latt")
            raise KeyboardInterrupt
        made.append(shard)
        real(job, shard)

    monkeypatch.setattr(shards, "decode_shard", dies)
    with pytest.raises(KeyboardInterrupt):
        decode(system, tmp_path / "cut")
    made.clear()
    monkeypatch.setattr(shards, "decode_shard", lambda job, shard: (made.append(shard), real(job, shard)))
    assert decode(system, tmp_path / "cut") == whole
    assert len(made) == 2


def test_a_shard_of_which_a_file_is_gone_is_made_again(
    system: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulates a kill during the removal of the finished shards."""
    whole = decode(system, tmp_path / "whole")

    def dies(folder: Path, **_: object) -> None:
        (folder / "test_whole" / "00000.lat").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", dies)
        decode(system, tmp_path / "cut")
    assert decode(system, tmp_path / "cut") == whole


@pytest.mark.parametrize("damage", ["half a json", "a bit", "lattices gone, then killed again"])
def test_a_shard_that_is_damaged_is_made_again(
    system: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    whole = decode(system, tmp_path / "whole")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", killed)
        decode(system, tmp_path / "cut")
    (shard,) = tmp_path.glob("cut/*/test_whole/00000.json")
    if damage == "half a json":
        shard.write_text("[{")
    elif damage == "a bit":
        lattices = bytearray(shard.with_suffix(".lat").read_bytes())
        lattices[1000] ^= 1
        shard.with_suffix(".lat").write_bytes(lattices)
    else:
        shard.with_suffix(".lat").unlink()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(shards.Decoder, "decode", killed)
            decode(system, tmp_path / "cut")
    assert decode(system, tmp_path / "cut") == whole


def test_the_window_with_the_fewest_dev_errors_is_kept(system: System, tmp_path: Path) -> None:
    """Decodes with every window. The best one is used on test, recorded, and used for transcription."""
    model = write_network(system.lang_dir.parent, StateTable.load(system.states).num_pdfs)
    windows = [Window(21, 21), Window(21, 7), Window(0, 0)]
    network = replace(system, model=model, feature_kind="logmel")
    data = system.lang_dir.parent / "data"
    (tmp_path / "run").mkdir()
    candidates = [replace(network, window=window) for window in windows]
    chosen = decode_sets(network, data, tmp_path / "run", OPTIONS, candidates=candidates, jobs=2)
    report = json.loads((tmp_path / "run" / "decode.json").read_text())
    errors = {each["window"]: each["errors"] for each in report["tried"]}
    assert list(errors) == ["21/21", "21/7", "whole"]
    assert errors[report["chosen"]["window"]] == min(errors.values()) == report["chosen"]["dev_errors"]
    assert str(chosen.window) == report["chosen"]["window"] and System.load(tmp_path / "run") == chosen
    (tmp_path / "alone").mkdir()
    decode_sets(replace(network, window=chosen.window), data, tmp_path / "alone", OPTIONS)
    for name in ("lattices/test.ark", f"ctm/{ctm_name('test', chosen.lm_scale)}"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()
    load_system(tmp_path / "run").words(np.random.default_rng(0).normal(0, 900, 12000).astype(np.float32))


def test_sequence_training_that_makes_more_errors_on_dev_is_not_decoded_with(
    system: System, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Either network may be the better one. Lattices of test are those of the better one alone."""
    source, num_pdfs = system.lang_dir.parent, StateTable.load(system.states).num_pdfs
    for name in ("data", "features", "lang"):
        (tmp_path / name).symlink_to(source / name)
    (tmp_path / "align").mkdir()
    (tmp_path / "align/mono").symlink_to(system.align_dir)
    shutil.copytree(source / "lm", tmp_path / "lm/kn")
    (tmp_path / "graph").mkdir()
    (tmp_path / "graph/mono_kn").symlink_to(system.graph_dir)
    caplog.set_level("INFO")
    runs = {"net": 1.0, "net-mmi": 5.0}  # scale of the logits. The first hears silence only
    for name, scale in runs.items():
        (tmp_path / "train" / name).mkdir(parents=True)
        write_network(source, num_pdfs, scale).rename(tmp_path / "train" / name / "best.pt")
    errors, systems = {}, {}
    for name, start in (("net", None), ("net-mmi", None), ("net", "net-mmi"), ("net-mmi", "net")):
        plan = SystemPlan(name, "mono", "logmel", tmp_path / "train" / name, 1, start=start)
        out = tmp_path / "decode" / (f"{name}-from-{start}_kn" if start else f"{name}_kn")
        out.mkdir(parents=True)
        decode_stage(Layout(tmp_path), plan, "kn", LISTS, SECTION, 1, "cpu", out)
        errors[name, start] = DevChoice.load(out).errors
        systems[name, start] = System.load(out)
    fewest = min(runs, key=lambda name: errors[name, None])
    assert errors["net", None] != errors["net-mmi", None], "the case decides nothing"
    for pair in (("net", "net-mmi"), ("net-mmi", "net")):
        assert errors[pair] == errors[fewest, None] and systems[pair].network == fewest
        assert f"fewest errors, {errors[pair]}, with the network of {fewest}" in caplog.text
        test = f"decode/{pair[0]}-from-{pair[1]}_kn/lattices/test.ark"
        assert (tmp_path / test).read_bytes() == (tmp_path / f"decode/{fewest}_kn/lattices/test.ark").read_bytes()


def test_a_run_can_be_moved_with_its_experiment(system: System, tmp_path: Path) -> None:
    root = tmp_path / "exp"
    shutil.copytree(system.lang_dir.parent, root)
    inside = System(
        root / "align", root / "features", root / "lang", root / "graph", "mfcc", lm_scale=LmScale(7.0, 1.0)
    )
    (root / "decode").mkdir()
    inside.save(root / "decode")
    root.rename(tmp_path / "elsewhere")
    loaded = System.load(tmp_path / "elsewhere" / "decode")
    assert loaded.graph == tmp_path / "elsewhere" / "graph" / "HCLG.fst"
    assert loaded.lm_scale == LmScale(7.0, 1.0)
    (tmp_path / "elsewhere" / "graph" / "HCLG.fst").unlink()
    with pytest.raises(InputError, match=r"HCLG\.fst: is missing"):
        System.load(tmp_path / "elsewhere" / "decode")


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": "asr_am system 1"}', "\xff"])
def test_a_damaged_system_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "system.json").write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match=r"system\.json"):
        System.load(tmp_path)


@pytest.mark.parametrize("name", ["align_dir", "features_dir", "lang_dir", "graph_dir"])
def test_a_system_without_one_of_its_folders_is_refused(system: System, tmp_path: Path, name: str) -> None:
    system.save(tmp_path)
    record = json.loads((tmp_path / "system.json").read_text())
    (tmp_path / "system.json").write_text(json.dumps({**record, name: None}))
    with pytest.raises(InputError, match=r"system\.json: not the record of a decoding run"):
        System.load(tmp_path)


def test_scores_for_other_states_are_refused(system: System, tmp_path: Path) -> None:
    class Wrong:
        def log_likelihoods(self, utterance: str) -> np.ndarray:
            return np.zeros((5, 3), np.float32)

    lang, states = Lang.load(system.lang_dir), StateTable.load(system.states)
    decoder = shards.Decoder(Wrong(), read_hclg(system.graph), None, lang, states, OPTIONS)
    with pytest.raises(InputError, match="utterance u1: scores of 3 pdfs"):
        decoder.decode("u1")


def test_a_set_without_features_is_refused(system: System, tmp_path: Path) -> None:
    root = tmp_path / "exp"
    shutil.copytree(system.lang_dir.parent, root)
    (root / "features" / "mfcc" / "test.scp").unlink()
    with pytest.raises(InputError, match=r"test\.scp"):
        decode(System(root / "align", root / "features", root / "lang", root / "graph", "mfcc"), root / "out")


def test_of_equal_weightings_the_least_extreme_is_chosen() -> None:
    grid = [LmScale(lm, wip) for lm in (5.0, 10.0, 15.0, 20.0) for wip in (-0.5, 0.0, 0.5)]
    assert grid[choose(grid, [1] * 12)] == LmScale(10.0, 0.0)
    assert grid[choose(grid, [1] * 11 + [0])] == LmScale(20.0, 0.5)


SECTION = {
    "self_loop_scale": 0.1, "search": {"beam": 10.0, "lattice_beam": 3.0}, "nbest": 3,
    "lm_weights": [5.0, 10.0], "insertion_penalties": [0.0, 0.5], "windows": ["21/21"],
}  # fmt: skip
LISTS = [[5.0, 10.0], [0.0, 0.5]]


@pytest.mark.parametrize("has_other", [True, False])
def test_dev_is_decoded_with_another_lm_than_one_that_knows_it(system: System, tmp_path: Path, has_other: bool) -> None:
    source = system.lang_dir.parent
    for name in ("align", "lm", "graph", "run", "alone"):
        (tmp_path / name).mkdir()
    for name in ("data", "features", "lang"):
        (tmp_path / name).symlink_to(source / name)
    (tmp_path / "align/mono").symlink_to(system.align_dir)
    shutil.copytree(source / "lm", tmp_path / "lm/given")
    (tmp_path / "lm/given/lm.json").write_text('{"dev_listed": 1.0}')
    (tmp_path / "graph/mono_given").symlink_to(system.graph_dir)
    states, tree = StateTable.load(system.states), DecisionTree.load(system.align_dir / "tree.json")
    if has_other:  # an LM of single words
        (tmp_path / "lm/given/unseen").mkdir()
        prepare_lm(
            source / "data", source / "lang", tmp_path / "lm/given/unseen", name="u", order=1, arpa=None, text="train"
        )
        (tmp_path / "graph/mono_given-unseen").mkdir()
        build_hclg(source / "lang", tmp_path / "lm/given/unseen", states, tree, tmp_path / "graph/mono_given-unseen")
    plan = SystemPlan("mono", "mono", "mfcc", None, None)
    decode_stage(Layout(tmp_path), plan, "given", LISTS, SECTION, 1, "cpu", tmp_path / "run")
    found = System.load(tmp_path / "run")
    assert found.graph == tmp_path / "graph/mono_given/HCLG.fst"
    if not has_other:
        assert found.lm_scale == LmScale(*UNTUNED), "nothing tells"
        return
    on_dev = found.of("dev")
    assert on_dev.graph_dir == tmp_path / "graph/mono_given-unseen" and found.of("test") == found
    scales = tuple(LmScale(lm, penalty) for lm in LISTS[0] for penalty in LISTS[1])
    for each, subset in ((on_dev, "dev"), (replace(found, dev_graph_dir=None), "test")):
        out = tmp_path / "alone" / subset
        out.mkdir()
        decode_sets(each, source / "data", out, replace(OPTIONS, grid=scales), sets=["dev", "test"])
        archive = f"lattices/{subset}.ark"
        assert (tmp_path / "run" / archive).read_bytes() == (out / archive).read_bytes()
    assert DevChoice.load(tmp_path / "run") == DevChoice.load(tmp_path / "alone/dev")
    assert (tmp_path / "run/lattices/dev.ark").read_bytes() != (tmp_path / "alone/test/lattices/dev.ark").read_bytes()


def test_a_network_that_makes_decoding_slow_is_told_after_the_first_utterances(
    system: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_pdfs = StateTable.load(system.states).num_pdfs
    network = replace(system, model=write_network(system.lang_dir.parent, num_pdfs), feature_kind="logmel")
    data = system.lang_dir.parent / "data"
    decode_sets(network, data, tmp_path / "a", OPTIONS, sets=["dev"])
    assert "tokens in a frame" not in caplog.text
    monkeypatch.setattr(shards, "MANY_TOKENS", 3)  # the whole graph has fewer states than a real search has tokens
    decode_sets(system, data, tmp_path / "b", OPTIONS, sets=["dev"])
    assert "tokens in a frame" not in caplog.text, "it is no network"
    decode_sets(network, data, tmp_path / "c", OPTIONS, sets=["dev"])
    (warning,) = [record.getMessage() for record in caplog.records if "tokens in a frame" in record.getMessage()]
    assert warning.startswith(f"{network.model}: the search expands ")
    assert f"(held-out loss 2.25; equal scores for all senones have {np.log(num_pdfs):.2f})" in warning
    assert "train it better (train.epochs, schedule.base), or lower decode.search.max_active" in warning
