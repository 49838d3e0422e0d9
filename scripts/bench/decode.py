"""Measures the speed of decoding on a given graph and given log-likelihoods, on one core.

    python scripts/bench/decode.py --run exp/an4/decode/mono_kn3 [--subset dev] [--write scores.scp] [--by-label]
    python scripts/bench/decode.py --run exp/an4/decode/mono_kn3 --scores scores.scp --beam 11

Prints frames per second of scoring, of the search, and of the rest (grid, times, confidences, n-best): CPU time, median
over repetitions. `--write` saves log-likelihoods for `--scores`, or with `--by-label` for other decoders.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path

from asr_am.decode.graph import read_hclg
from asr_am.decode.hypotheses import hypotheses
from asr_am.decode.lattice import Lattice, LmScale
from asr_am.decode.nbest import nbest
from asr_am.decode.scorer import ArchiveSource, write_log_likelihoods
from asr_am.decode.search import search
from asr_am.decode.system import System
from asr_am.features.reader import FeatureReader
from asr_am.hmm.states import StateTable
from asr_am.lang.lang_dir import Lang

GRID = tuple(LmScale(float(lm), wip) for lm in range(5, 21) for wip in (-0.5, 0.0, 0.5, 1.0))


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of decoding, one core.")
    parser.add_argument("--run", type=Path, required=True, help="a decoding run (with system.json)")
    parser.add_argument("--subset", default="dev")
    parser.add_argument("--scores", type=Path, help="log-likelihoods by pdf (.scp) instead of the model's")
    parser.add_argument("--write", type=Path, help="write the log-likelihoods by pdf here (.scp)")
    parser.add_argument("--by-label", action="store_true", help="--write them by graph label")
    parser.add_argument("--utterances", type=int, default=40)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--beam", type=float)
    options = parser.parse_args()
    system = System.load(options.run)
    how = system.search if options.beam is None else replace(system.search, beam=options.beam)
    source = ArchiveSource(options.scores) if options.scores else system.source(options.subset)
    scorer = source.load()
    utterances = FeatureReader(system.features_dir, "mfcc", options.subset).utterances[: options.utterances]
    states, graph, lang = StateTable.load(system.states), read_hclg(system.graph), Lang.load(system.lang_dir)
    if options.write:
        write_log_likelihoods(scorer, utterances, states if options.by_label else None, options.write)
    seconds: dict[str, list[float]] = {"score": [], "search": [], "words": []}
    frames = arcs = 0
    for _ in range(options.repeat):
        begin = time.process_time()
        scores = [scorer.log_likelihoods(utterance) for utterance in utterances]
        scored = time.process_time()
        found = [search(graph, scores_TP, states, how) for scores_TP in scores]
        searched = time.process_time()
        lattices = [Lattice.from_arrays(result.arrays) for result in found if result.data]
        for lattice in lattices:
            hypotheses(lattice, GRID, states, lang)
            nbest(lattice, LmScale(10.0), 20)
        ended = time.process_time()
        for name, duration in zip(seconds, (scored - begin, searched - scored, ended - searched), strict=True):
            seconds[name].append(duration)
        frames = sum(map(len, scores))
        arcs = sum(len(lattice.source_A) for lattice in lattices)
    print(f"{len(utterances)} utterances, {frames} frames, {arcs / frames:.1f} lattice arcs per frame, beam {how.beam}")
    for name, durations in seconds.items():
        print(f"{name:8s} {frames / statistics.median(durations):12,.0f} frames/s")


if __name__ == "__main__":
    main()
