"""Networks whose scores are averaged: stage decode with `combine`."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from asr_am.decode.dev_choice import DevChoice
from asr_am.decode.score_server import scores_from_gpu
from asr_am.decode.scorer import Window
from asr_am.decode.system import System
from asr_am.errors import InputError
from asr_am.features.reader import FeatureReader
from asr_am.hmm.states import StateTable
from asr_am.stages.decode import combination
from asr_am.stages.decode import decode as decode_stage
from asr_am.stages.layout import Layout
from asr_am.stages.systems import SystemPlan
from tests.decode.test_decode import LISTS, SECTION
from tests.support.decoding_corpus import write_network, write_system

RUNS = {"first": (1.0, Window(21, 10)), "second": (5.0, Window(21, 21))}  # scale of the logits, and window


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """exp/<corpus> with two networks, and a record of a decoding run of each."""
    root = tmp_path_factory.mktemp("corpus")
    system = write_system(root)
    num_pdfs = StateTable.load(system.states).num_pdfs
    (root / "align/mono").symlink_to(system.align_dir)
    shutil.copytree(root / "lm", root / "lm/kn")
    (root / "graph/mono_kn").symlink_to(system.graph_dir)
    for name, (scale, window) in RUNS.items():
        model, decoded = root / "train" / name / "best.pt", root / "decode" / f"{name}_kn"
        model.parent.mkdir(parents=True)
        write_network(root, num_pdfs, scale).rename(model)
        decoded.mkdir(parents=True)
        replace(system, model=model, feature_kind="logmel", window=window).save(decoded)
    return root


def test_the_scores_are_the_mean_of_the_networks(root: Path, tmp_path: Path) -> None:
    singles = [System.load(root / "decode" / f"{name}_kn") for name in RUNS]
    combined = combination([root / "decode" / f"{name}_kn" for name in RUNS])
    combined.save(tmp_path)
    source = System.load(tmp_path).source("dev")
    for utterance in FeatureReader(combined.features_dir, "logmel", "dev").utterances[:2]:
        each = [single.source("dev").load().log_likelihoods(utterance) for single in singles]
        assert not np.allclose(*each)
        assert np.allclose(source.load().log_likelihoods(utterance), np.mean(each, axis=0), atol=1e-5)
        with scores_from_gpu(source, "test") as served:
            assert np.array_equal(served.load().log_likelihoods(utterance), source.load().log_likelihoods(utterance))


def test_stage_decode_writes_the_combined_system(root: Path, tmp_path: Path) -> None:
    plan = SystemPlan("combined", "mono", "logmel", None, None, combined=tuple(RUNS))
    decode_stage(Layout(root), plan, "kn", LISTS, SECTION, 1, "cpu", tmp_path)
    system = System.load(tmp_path)
    assert (system.network, system.window) == ("first", RUNS["first"][1])
    assert [(model.parent.name, window) for model, window in system.others] == [("second", RUNS["second"][1])]
    assert (tmp_path / "lattices/test.ark").stat().st_size


def test_networks_that_know_dev_do_not_decode_it(root: Path, tmp_path: Path) -> None:
    """Dev has the words of the networks before they were trained on it, test those of the networks after."""
    system = System.load(root / "decode/first_kn")
    num_pdfs = StateTable.load(system.states).num_pdfs
    decoded = Layout(tmp_path)
    for name in ("align", "data", "features", "graph", "lang", "lm", "train"):
        (tmp_path / name).symlink_to(root / name)
    for name in RUNS:
        (root / "train" / f"{name}-final").mkdir()
        write_network(root, num_pdfs, 3.0).rename(root / "train" / f"{name}-final/best.pt")

    def decode_plan(out: str, plan: SystemPlan) -> System:
        decoded.decoded(f"{out}_kn").mkdir(parents=True)
        decode_stage(decoded, plan, "kn", LISTS, SECTION, 1, "cpu", decoded.decoded(f"{out}_kn"))
        return System.load(decoded.decoded(f"{out}_kn"))

    plans = [SystemPlan(name, "mono", "logmel", root / "train" / name, 1) for name in RUNS]
    before = [decode_plan(f"{plan.name}-before", plan) for plan in plans]
    finals = [replace(plan, final=root / "train" / f"{plan.name}-final") for plan in plans]
    after = [decode_plan(plan.name, plan) for plan in finals]
    both = SystemPlan("both", "mono", "logmel", None, None, combined=tuple(RUNS))
    names = [(tuple(f"{name}-before" for name in RUNS), "both-before"), (tuple(RUNS), "both")]
    before_both, after_both = (decode_plan(out, replace(both, combined=combined)) for combined, out in names)
    for old, new in ((before[0], after[0]), (before_both, after_both)):
        assert [model.parent.name for model, _ in new.networks] == [f"{m.parent.name}-final" for m, _ in old.networks]
        assert new.on_dev == old and new.lm_scale == old.lm_scale
    for name in ("first", "both"):
        one, other = decoded.decoded(f"{name}-before_kn"), decoded.decoded(f"{name}_kn")
        assert (one / "lattices/dev.ark").read_bytes() == (other / "lattices/dev.ark").read_bytes()
        assert (one / "lattices/test.ark").read_bytes() != (other / "lattices/test.ark").read_bytes()
        assert DevChoice.load(one) == DevChoice.load(other)


def test_a_gmm_cannot_be_combined(root: Path, tmp_path: Path) -> None:
    replace(System.load(root / "decode/first_kn"), model=None).save(tmp_path)
    with pytest.raises(InputError, match="has no network"):
        combination([root / "decode/first_kn", tmp_path])


def test_networks_of_other_features_are_refused(root: Path, tmp_path: Path) -> None:
    replace(System.load(root / "decode/first_kn"), feature_kind="mfcc").save(tmp_path)
    with pytest.raises(InputError, match="other states, features or graph"):
        combination([root / "decode/first_kn", tmp_path])
