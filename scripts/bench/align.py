"""Measures alignment in frames per second, likelihoods included, in one process.

    python scripts/bench/align.py exp/an4 [tri]

Needs a corpus directory with stages 0 to 3 done. Prints CPU time and wall time. Kaldi's gmm-align-compiled was measured
at 154,000 frames/s.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

from asr_am.hmm.align_corpus import load_set
from asr_am.hmm.alignment_graphs import compile_graphs
from asr_am.hmm.gmm_system import GmmSystem
from asr_am.hmm.viterbi import AlignOptions, align
from asr_am.lang.lang_dir import Lang


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exp", type=Path, help="exp/<corpus>")
    parser.add_argument("system", nargs="?", default="tri", choices=("mono", "tri"))
    parser.add_argument("--set", default="dev", choices=("train", "dev"))
    parser.add_argument("--repeat", type=int, default=5, help="repetitions, of which the fastest is printed")
    options = parser.parse_args()

    torch.set_num_threads(1)
    lang = Lang.load(options.exp / "lang")
    system = GmmSystem.load(options.exp / "align" / options.system)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        data = load_set(options.exp / "data", options.exp / "features", lang, options.set, scratch)
        began = time.process_time()
        graphs = compile_graphs(
            scratch / "graphs", data.frames, data.words_U, lang.directory / "L.fst", system.tree, system.states,
            AlignOptions().self_loop_scale, 1,
        )  # fmt: skip
        print(f"graphs: {1000 * (time.process_time() - began) / len(data.words_U):.2f} ms per utterance (CPU)")
        seconds = []
        for _ in range(options.repeat):
            cpu, wall = time.process_time(), time.perf_counter()
            align(graphs, data.frames, system.gmms, AlignOptions(), 1, "align")
            seconds.append((time.process_time() - cpu, time.perf_counter() - wall))
    cpu, wall = (data.frames.num_frames / min(column) for column in zip(*seconds, strict=True))
    print(f"alignment with {system.gmms.num_gaussians} Gaussians: {cpu:,.0f} frames/s of CPU, {wall:,.0f} of wall time")


if __name__ == "__main__":
    main()
