"""Models and decoding graphs by path: a process loads each file once.

Transcribing a call decodes several channels, each in several passes, with the same files. Callers share what these
functions return and must not modify it.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asr_am.decode.graph import lm_of, read_hclg
from asr_am.hmm.states import StateTable
from asr_am.lang.lang_dir import Lang
from asr_am.lang.ngram_automaton import LmPair
from asr_am.lang.prepare import FIRST_PASS

if TYPE_CHECKING:
    from asr_am.decode.search_graph import SearchGraph
    from asr_am.features.ivector.estimator import Estimator
    from asr_am.hmm.gmm import DiagGmms
    from asr_am.models.acoustic import AcousticModel


@lru_cache(maxsize=1)
def load_graph(path: Path) -> SearchGraph:
    """Returns the HCLG at `path`, see `read_hclg`."""
    return read_hclg(path)


@lru_cache(maxsize=1)
def load_lm_pair(graph: Path) -> LmPair | None:
    """Returns the models to rescore lattices of the HCLG at `graph` with, None if the graph has its whole LM."""
    lm = lm_of(graph)
    return LmPair.load(lm) if lm is not None and (lm / FIRST_PASS).exists() else None


@lru_cache(maxsize=1)
def load_lang(lang_dir: Path) -> Lang:
    """Returns the lang directory at `lang_dir`, see `Lang.load`."""
    return Lang.load(lang_dir)


@lru_cache(maxsize=1)
def load_states(path: Path) -> StateTable:
    """Returns the state table at `path`, see `StateTable.load`."""
    return StateTable.load(path)


@lru_cache(maxsize=4)  # adaptation alternates between two sets of mixtures
def load_gmms(path: Path) -> DiagGmms:
    """Returns the Gaussian mixtures at `path`, see `DiagGmms.load`."""
    from asr_am.hmm.gmm import DiagGmms

    return DiagGmms.load(path)


@lru_cache(maxsize=1)
def load_ivector_models(folder: Path) -> Estimator:
    """Returns the UBM and i-vector extractor in `folder`, see `load_estimator`."""
    from asr_am.features.ivector.extract_ivectors import load_estimator

    return load_estimator(folder)


@lru_cache(maxsize=4)  # networks whose scores are averaged
def load_network(path: Path) -> tuple[AcousticModel, dict[str, Any]]:
    """Returns the network at `path` in eval mode and its info, see `load_acoustic_model`."""
    from asr_am.models.model_file import load_acoustic_model

    return load_acoustic_model(path)
