"""Measures the lattice search beside kaldi_decoder's on one graph, on one core.

    python scripts/bench/search.py --graph exp/an4/graph/tri_kn3 --states exp/an4/align/tri/states.npz
    python scripts/bench/search.py --run exp/minicts/decode/mono_kn3 --subset dev

With `--run`, scores are those of the run's acoustic model. Otherwise they are synthetic: sentences are random paths of
the graph, drawn with its probabilities, and every pdf has a score of noise, the right one a better score. `--clarity`
says how much better.

kaldi_decoder has no limit on active tokens, so it runs at the beams only. The searches take turns, utterance by
utterance. Frames per second are of CPU time. Ours includes the conversion of the lattice to an archive's bytes.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from pathlib import Path

import kaldi_decoder
import kaldifst
import numpy as np

from asr_am.decode.graph import read_fst, read_hclg
from asr_am.decode.lattice import Lattice, LmScale, best_paths, costs
from asr_am.decode.search import SearchOptions, search
from asr_am.decode.search_graph import LABEL, TARGET, SearchGraph
from asr_am.decode.system import System
from asr_am.features.reader import FeatureReader
from asr_am.hmm.fst_arrays import FstArrays, fst_bytes
from asr_am.hmm.states import StateTable

SETTINGS = ((11.0, 0), (13.0, 0), (11.0, 2500), (13.0, 7000))  # beam, max_active


def random_pdfs(graph: SearchGraph, states: StateTable, rng: np.random.Generator, num_frames: int) -> np.ndarray:
    """Returns the pdfs of a random walk through the graph of `num_frames` frames."""
    pdfs: list[int] = []
    state = graph.start
    while len(pdfs) < num_frames:
        first, end = graph.first_S2[state, 0], graph.first_S2[state + 1, 0]
        if first == end:  # only a final state
            state = graph.start
            continue
        probability = np.exp(-graph.weight_A[first:end].astype(np.float64))
        arc = first + rng.choice(end - first, p=probability / probability.sum())
        label, target = graph.arc_A4[arc, LABEL], graph.arc_A4[arc, TARGET]
        if label:
            pdfs.append(states.pdf_L[label - 1])
        state = ~target if target < 0 else target
    return np.array(pdfs)


def synthetic_scores(graph: SearchGraph, states: StateTable, count: int, clarity: float) -> list[np.ndarray]:
    """Returns float32 [T, P] log-likelihoods of `count` utterances of 3 to 10 s.

    Noise has a standard deviation of 10 and lasts some frames, as that of Gaussian mixtures does.
    """
    rng = np.random.default_rng(0)
    utterances = []
    for _ in range(count):
        pdfs = random_pdfs(graph, states, rng, int(rng.integers(300, 1000)))
        white = rng.standard_normal((len(pdfs) + 2, states.num_pdfs), dtype=np.float32)
        scores_TP = (white[:-2] + white[1:-1] + white[2:]) * np.float32(10 / np.sqrt(3))
        scores_TP[np.arange(len(pdfs)), pdfs] += np.float32(clarity)
        utterances.append(scores_TP)
    return utterances


def kaldi_search(
    fst: kaldifst.StdVectorFst, scores_TP: np.ndarray, states: StateTable, options: SearchOptions
) -> kaldifst.Lattice | None:
    """Returns the raw lattice of kaldi_decoder's LatticeSimpleDecoder, with scaled acoustic costs."""
    scores_TL = np.ascontiguousarray(scores_TP[:, states.pdf_L], dtype=np.float32)
    scores_TL *= np.float32(options.acoustic_scale)
    config = kaldi_decoder.LatticeSimpleDecoderConfig(beam=options.beam, lattice_beam=options.lattice_beam)
    decoder = kaldi_decoder.LatticeSimpleDecoder(fst, config)
    decoder.decode(kaldi_decoder.DecodableCtc(scores_TL))
    found, lattice = decoder.get_raw_lattice()
    return lattice if found and lattice.num_states else None


def best_cost(arrays: FstArrays, scale: LmScale) -> float:
    lattice = Lattice.from_arrays(arrays)
    return float(costs(lattice, [scale])[best_paths(lattice, [scale])[0], 0].sum())


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of the search, one core.")
    parser.add_argument("--run", type=Path, help="a decoding run (with system.json)")
    parser.add_argument("--subset", default="dev")
    parser.add_argument("--graph", type=Path, help="folder of a decoding graph, without --run")
    parser.add_argument("--states", type=Path, help="states.npz of the graph, without --run")
    parser.add_argument("--clarity", type=float, default=25.0, help="of synthetic scores")
    parser.add_argument("--utterances", type=int, default=6)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--no-kaldi", action="store_true", help="without kaldi_decoder")
    given = parser.parse_args()
    system = System.load(given.run) if given.run else None
    path = system.graph if system else given.graph / "HCLG.fst"
    states = StateTable.load(system.states if system else given.states)
    begin = time.perf_counter()
    graph = read_hclg(path)
    seconds = time.perf_counter() - begin
    if system:
        scorer = system.source(given.subset).load()
        utterances = FeatureReader(system.features_dir, "mfcc", given.subset).utterances[: given.utterances]
        scores = [scorer.log_likelihoods(utterance) for utterance in utterances]
    else:
        scores = synthetic_scores(graph, states, given.utterances, given.clarity)
    frames = sum(map(len, scores))
    print(
        f"{graph.num_states} states, {graph.num_arcs} arcs, {states.num_pdfs} pdfs, loaded in {seconds:.1f} s, "
        f"{(graph.arc_A4.nbytes + graph.first_S2.nbytes + graph.final_S.nbytes) / 1e6:.0f} MB; "
        f"{len(scores)} utterances, {frames} frames"
    )
    search(graph, scores[0][:30], states, SearchOptions())  # compiles
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    fst = None if given.no_kaldi else read_fst(path)
    print("beam  max_active  frames/s  kaldi_decoder  ratio  active  arcs/frame  cost above kaldi_decoder's best")
    for beam, max_active in SETTINGS:
        options = SearchOptions(beam=beam, max_active=max_active, min_active=0)
        scale = LmScale(1 / options.acoustic_scale)
        ours: list[float] = []
        theirs: list[float] = []
        for _ in range(given.repeat):
            took = [0.0, 0.0]
            active = arcs = 0.0
            worse = []
            for scores_TP in scores:
                begin = time.process_time()
                found = search(graph, scores_TP, states, options)
                data = found.data
                took[0] += time.process_time() - begin
                active += found.active * len(scores_TP)
                arcs += len(found.arrays.ilabel_A) if data and found.arrays else 0
                if fst is not None and max_active == 0:
                    begin = time.process_time()
                    lattice = kaldi_search(fst, scores_TP, states, options)
                    took[1] += time.process_time() - begin
                    if lattice is not None and found.arrays is not None:
                        kaldifst.scale_lattice([[1.0, 0.0], [0.0, 1.0 / options.acoustic_scale]], lattice)
                        other = FstArrays.from_lattice(fst_bytes(lattice))[0]
                        worse.append(best_cost(found.arrays, scale) - best_cost(other, scale))
            ours.append(frames / took[0])
            theirs.append(frames / took[1] if took[1] else float("nan"))
        ratio = statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))
        speeds = f"{statistics.median(ours):8,.0f}  {statistics.median(theirs):13,.0f}  {ratio:5.2f}"
        print(
            f"{beam:4g}  {max_active or 'none':>10}  {speeds}  {active / frames:6,.0f}  {arcs / frames:10.1f}  "
            f"{max(worse, default=float('nan')):.4f}",
            flush=True,
        )
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    if fst is None:
        print(f"peak memory of a search above that of graph and scores: {grown / 1e3:.0f} MB")


if __name__ == "__main__":
    main()
