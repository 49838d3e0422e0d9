"""GMM systems as files of Kaldi (`final.mdl`: transition model and mixtures), in both directions.

A transition-id is a transition out of one (phone, HMM state, pdf) triple. Ids count from 1, by triple in sorted order
and by transition in the topology's order. In our topologies each state has two: the self-loop, then the exit, so that
label l has the ids 2 l - 1 and 2 l.

Shapes: K transition-ids, L triples, T frames, G Gaussians, D dimensions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from asr_am.data.kaldi_binary import KaldiReader, KaldiWriter, read_mixture
from asr_am.errors import InputError
from asr_am.hmm.gmm import DiagGmms
from asr_am.hmm.hmm_topology import INITIAL_LOOP
from asr_am.hmm.states import StateTable

REMEDY = "give a complete file of a GMM system"
NO_PDF = -1
MIN_PROB = 1e-4  # of staying in a state or of leaving it


@dataclass(frozen=True)
class TransitionModel:
    """Kaldi's transition model.

    Attributes:
        states_P: emitting HMM states of each phone.
        triples_L3: phone, HMM state, pdf of each transition state, sorted.
        label_K: label (row of `triples_L3`, from 1) of each transition-id, at index id - 1.
        loop_K: whether it is a self-loop.
        log_prob_K: its log probability, float32.
    """

    states_P: dict[int, int]
    triples_L3: np.ndarray
    label_K: np.ndarray
    loop_K: np.ndarray
    log_prob_K: np.ndarray

    def labels(self, ids_T: np.ndarray) -> np.ndarray:
        """Returns the graph labels of transition-ids, int32 [T]. Raises ValueError for an id that does not exist."""
        if len(ids_T) == 0 or ids_T.min() < 1 or ids_T.max() > len(self.label_K):
            raise ValueError(f"transition-ids outside 1..{len(self.label_K)}")
        return self.label_K[ids_T - 1].astype(np.int32)

    def state_table(self) -> StateTable:
        """Returns the states with the probabilities of their self-loops.

        Other transitions become one exit to the next state, so a topology with skips, as Kaldi's of silence, becomes
        one without.
        """
        size = len(self.triples_L3)
        loop_L = np.bincount(self.label_K - 1, np.exp(self.log_prob_K) * self.loop_K, minlength=size)
        loop_L = np.clip(loop_L, MIN_PROB, 1 - MIN_PROB)
        return StateTable(
            self.triples_L3.astype(np.int32), np.log(loop_L).astype(np.float32), np.log1p(-loop_L).astype(np.float32),
            dict(self.states_P), int(self.triples_L3[:, 2].max()) + 1,
        )  # fmt: skip


def read_model(path: Path) -> tuple[TransitionModel, DiagGmms]:
    """Reads a GMM system. Raises InputError if the file is damaged, or of a chain model or a network."""
    reader = KaldiReader(path, REMEDY)
    transitions, gmms = _read_transitions(reader), _read_mixtures(reader)
    if (pdfs := int(transitions.triples_L3[:, 2].max()) + 1) != gmms.num_pdfs:
        raise InputError(f"{path}: {gmms.num_pdfs} mixtures for {pdfs} pdfs; {REMEDY}")
    return transitions, gmms


def _read_transitions(reader: KaldiReader) -> TransitionModel:
    reader.expect("<TransitionModel>")
    topology = _read_topology(reader)
    kind = reader.expect("<Triples>", "<Tuples>")
    rows = []
    for _ in range(reader.integer()):
        row = [reader.integer() for _ in range(3)]
        if kind == "<Tuples>" and reader.integer() != row[2]:
            raise reader.error("a state with two pdfs, as in chain models, which cannot be read,")
        rows.append(row)
    reader.expect("</Triples>", "</Tuples>")
    reader.expect("<LogProbs>")
    log_prob_K = reader.vector()[1:]
    reader.expect("</LogProbs>")
    reader.expect("</TransitionModel>")
    label, loop = [], []
    for number, (phone, state, _) in enumerate(rows, start=1):
        try:
            targets = topology[phone][state]
        except (KeyError, IndexError):
            raise reader.error(f"phone {phone} has no state {state}") from None
        label += [number] * len(targets)
        loop += [target == state for target in targets]
    if len(label) != len(log_prob_K) or not rows or not np.isfinite(log_prob_K).all():
        raise reader.error(f"{len(log_prob_K)} probabilities of {len(label)} transitions")
    states_P = {phone: len(states) - 1 for phone, states in topology.items()}
    return TransitionModel(states_P, np.array(rows), np.array(label), np.array(loop), log_prob_K)


def _read_topology(reader: KaldiReader) -> dict[int, list[list[int]]]:
    """Returns the targets of the transitions of each state of each phone. The last state emits nothing."""
    reader.expect("<Topology>")
    phones, entry_of = reader.integers(), reader.integers()
    count = reader.integer()
    if count == -1:  # the format of chain models
        raise reader.error("a chain model, which cannot be read; give a GMM system;")
    entries = []
    for _ in range(count):
        states: list[list[int]] = []
        for _ in range(reader.integer()):
            pdf_class, targets = reader.integer(), []
            for _ in range(reader.integer()):
                targets.append(reader.integer())
                reader.number()
            if pdf_class not in (len(states), NO_PDF):
                raise reader.error(f"state {len(states)} has pdf-class {pdf_class}: states that share pdfs")
            states.append(targets)
        entries.append(states)
    reader.expect("</Topology>")
    if any(phone >= len(entry_of) or not 0 <= entry_of[phone] < len(entries) for phone in phones):
        raise reader.error("a phone without a topology")
    return {phone: entries[entry_of[phone]] for phone in phones}


def _read_mixtures(reader: KaldiReader) -> DiagGmms:
    reader.expect("<DIMENSION>")
    dim = reader.integer()
    reader.expect("<NUMPDFS>")
    weights, means, variances, offsets = [], [], [], [0]
    for pdf in range(reader.integer()):
        weights_G, means_GD, vars_GD = read_mixture(reader)
        if means_GD.shape[1] != dim:
            raise reader.error(f"pdf {pdf} has {means_GD.shape[1]} dimensions, not {dim}")
        weights.append(weights_G)
        means.append(means_GD)
        variances.append(vars_GD)
        offsets.append(offsets[-1] + len(weights_G))
    if not weights:
        raise reader.error("no pdf")
    return DiagGmms(
        np.concatenate(weights), np.concatenate(means), np.concatenate(variances), np.array(offsets, dtype=np.int64)
    )


def write_model(path: Path, states: StateTable, gmms: DiagGmms) -> None:
    """Writes a GMM system, with a topology of self-loops and exits."""
    writer = KaldiWriter()
    writer.token("<TransitionModel>")
    _write_topology(writer, states.states_P)
    writer.token("<Triples>")
    writer.integer(len(states.labels_L3))
    writer.integer(*states.labels_L3.ravel().tolist())
    writer.token("</Triples>", "<LogProbs>")
    writer.vector(np.concatenate([[0.0], np.stack([states.loop_L, states.next_L], axis=1).ravel()]))
    writer.token("</LogProbs>", "</TransitionModel>", "<DIMENSION>")
    writer.integer(gmms.dim)
    writer.token("<NUMPDFS>")
    writer.integer(gmms.num_pdfs)
    for begin, end in zip(gmms.offsets_P1[:-1], gmms.offsets_P1[1:], strict=True):
        precision_GD = 1 / gmms.vars_GD[begin:end]
        writer.token("<DiagGMM>", "<GCONSTS>")
        writer.vector(gmms.constant_G[begin:end])
        writer.token("<WEIGHTS>")
        writer.vector(gmms.weights_G[begin:end])
        writer.token("<MEANS_INVVARS>")
        writer.matrix(gmms.means_GD[begin:end] * precision_GD)
        writer.token("<INV_VARS>")
        writer.matrix(precision_GD)
        writer.token("</DiagGMM>")
    writer.save(path)


def _write_topology(writer: KaldiWriter, states_P: Mapping[int, int]) -> None:
    by_length: dict[int, list[int]] = defaultdict(list)
    for phone, count in sorted(states_P.items()):
        by_length[count].append(phone)
    entry_of = [NO_PDF] * (max(states_P) + 1)
    for entry, phones in enumerate(by_length.values()):
        for phone in phones:
            entry_of[phone] = entry
    writer.token("<Topology>")
    writer.integers(sorted(states_P))
    writer.integers(entry_of)
    writer.integer(len(by_length))
    for count in by_length:
        writer.integer(count + 1)
        for state in range(count):
            writer.integer(state, 2, state)
            writer.number(INITIAL_LOOP)
            writer.integer(state + 1)
            writer.number(1 - INITIAL_LOOP)
        writer.integer(NO_PDF, 0)
    writer.token("</Topology>")


def transition_ids(labels_T: np.ndarray) -> np.ndarray:
    """Returns the transition-ids of an alignment, int32 [T], in Kaldi's usual order: the exit before the self-loops."""
    ids_T = 2 * labels_T - 1
    first_T = np.ones(len(labels_T), bool)
    first_T[1:] = labels_T[1:] != labels_T[:-1]
    ids_T[first_T] += 1
    return ids_T.astype(np.int32)
