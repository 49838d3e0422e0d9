"""Scores from a process that owns the GPU. Here it owns the CPU, with the same bits as without it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from asr_am.decode import shards
from asr_am.decode.lattice import LmScale
from asr_am.decode.score_server import ServedSource, scores_from_gpu
from asr_am.decode.scorer import NeuralSource, Window
from asr_am.decode.search import SearchOptions
from asr_am.decode.shards import DecodeOptions, Job, decode_shards, read_shards
from asr_am.decode.system import System
from asr_am.errors import InputError
from asr_am.features.reader import FeatureReader
from asr_am.hmm.states import StateTable
from tests.support.decoding_corpus import write_network, write_system


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> System:
    root = tmp_path_factory.mktemp("system")
    system = write_system(root)
    model = write_network(root, StateTable.load(root / "align/states.npz").num_pdfs)
    return replace(system, model=model, feature_kind="logmel", window=Window(21, 10))


def test_scores_and_errors_come_from_the_owner(system: System) -> None:
    source = system.source("dev")
    assert isinstance(source, NeuralSource)
    utterance = FeatureReader(system.features_dir, "logmel", "dev").utterances[0]
    torch.set_num_threads(1)
    with scores_from_gpu(source, "test") as served:
        assert isinstance(served, ServedSource)
        for _ in range(2):
            assert np.array_equal(served.load().log_likelihoods(utterance), source.load().log_likelihoods(utterance))
        with pytest.raises(InputError, match="nobody"):
            served.load().log_likelihoods("nobody")
        assert not Path(served.address).parent.stat().st_mode & 0o077, "no other user can connect"
    with pytest.raises(RuntimeError, match="has ended"):
        served.load().log_likelihoods(utterance)
    with pytest.raises(InputError, match="nowhere"), scores_from_gpu(replace(source, model=Path("nowhere")), "test"):
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_search_scores_by_itself(system: System) -> None:
    source = system.source("dev")
    for device in ("auto", "cpu"):
        with scores_from_gpu(source, device) as same:
            assert same is source


def test_the_search_in_processes_finds_the_same(
    system: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SHARD", 2)
    search = SearchOptions(beam=6.0, lattice_beam=1.0, max_active=100, min_active=20)
    utterances = FeatureReader(system.features_dir, "logmel", "dev").utterances
    found = {}
    for device in ("cpu", "test"):
        options = DecodeOptions(search, (LmScale(10.0),), nbest=0, device=device)
        job = Job(system.source("dev"), system.graph, system.lang_dir, system.states, options)
        decode_shards(job, utterances, tmp_path / device, 2, device)
        results = read_shards(tmp_path / device)
        found[device] = [replace(result, seconds=0.0) for result in results]
    assert found["cpu"] == found["test"] and not all(result.empty for result in found["cpu"])
