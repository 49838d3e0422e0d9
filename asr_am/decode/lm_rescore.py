"""Stage rescore: a decoding run under a mixture of its n-gram LM and a recurrent LM.

The mixture (`asr_am.decode.lm_mixture`) replaces the n-gram LM in the graph costs of lattices
(`asr_am.decode.lattice_rescore`). Costs of pronunciations and transitions, acoustic costs and times stay. The best
words go into CTM files as in stage decode: for dev under every LM scale of the grid, for test under the best on dev.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from asr_am.data.manifests import read_supervisions
from asr_am.data.textfile import write_lines
from asr_am.decode.ctm import CtmWord, ctm_name, write_ctm
from asr_am.decode.dev_choice import choose_on_dev, read_reference
from asr_am.decode.hypotheses import hypotheses
from asr_am.decode.lattice import Lattice, LmScale
from asr_am.decode.lattice_map import map_lattices
from asr_am.decode.lattice_rescore import LatticeModels, LatticeOptions
from asr_am.decode.lattice_rescore import rescore as rescore_lattice
from asr_am.decode.lm_mixture import LmMixture, fit_weight
from asr_am.decode.loading import load_lang, load_states
from asr_am.decode.system import System
from asr_am.lang.arpa import read_arpa
from asr_am.lang.lang_dir import vocabulary
from asr_am.lang.ngram_automaton import NgramAutomaton
from asr_am.models.device import choose_device
from asr_am.models.lm_file import load_lm

log = logging.getLogger(__name__)

Words = dict[str, list[list[CtmWord]]]  # by utterance and LM scale


def rescore(
    decoded: Path, data_dir: Path, arpa: Path, lm: Path, out: Path, *, grid: Sequence[LmScale],
    how: LatticeOptions, jobs: int, device: str = "auto",
) -> None:  # fmt: skip
    """Rescores dev and test of a decoding run. Writes the CTM files, best_on_dev.json and rescore.json.

    Args:
        arpa: the n-gram LM that the run used.
        lm: checkpoint of the recurrent LM.
        grid: LM scales to write CTM files of dev for.
        device: where the recurrent LM scores sentences, see `choose_device`. Lattices are rescored on the CPU.

    Raises:
        InputError: a file is missing or damaged.
    """
    lang = load_lang(System.load(decoded).lang_dir)
    lstm, units, _ = load_lm(lm)
    lstm.to(choose_device(device))
    mixture, perplexities = fit_weight(LmMixture(read_arpa(arpa), lstm, units), data_dir, vocabulary(lang.words))
    lstm.cpu()  # forked processes cannot use the GPU
    report: dict[str, object] = {"weight": round(mixture.weight, 4)}
    for subset in ("dev", "test"):
        words = rescore_lattices(decoded, subset, mixture, grid, how, jobs)
        _write_set(out, subset, data_dir, words, grid)
        record: dict[str, object] = {"perplexity": asdict(perplexities[subset])}
        if subset == "dev":

            def write_more(scales: Sequence[LmScale]) -> None:
                _write_set(out, "dev", data_dir, rescore_lattices(decoded, "dev", mixture, scales, how, jobs), scales)

            choice = choose_on_dev(read_reference(data_dir, subset), out, subset, grid, jobs, write_more)
            choice.save(out)
            record["errors"] = choice.errors
            log.info("dev: %d errors", choice.errors)
            grid = [choice.scale]
        report[subset] = record
    write_lines(out / "rescore.json", [json.dumps(report, indent=1)])


def rescore_lattices(
    decoded: Path, subset: str, mixture: LmMixture, grid: Sequence[LmScale], options: LatticeOptions, jobs: int
) -> Words:
    """Returns the words of a set under each LM scale, from lattices rescored at the scale that stage decode chose."""
    system = System.load(decoded)
    lang = load_lang(system.lang_dir)
    models = LatticeModels(
        NgramAutomaton.from_arpa(mixture.arpa, lang.words), mixture.arpa.order, mixture.lstm, mixture.units,
        mixture.weight, lang.word_names,
    )  # fmt: skip
    work = partial(_rescored_words, models, system, grid, options)
    return map_lattices(decoded, subset, work, jobs, f"rescoring {subset}")


def _rescored_words(
    models: LatticeModels, system: System, grid: Sequence[LmScale], options: LatticeOptions, lattice: Lattice
) -> list[list[CtmWord]]:
    rescored = Lattice.from_arrays(rescore_lattice(lattice, models, system.lm_scale, options))
    return hypotheses(rescored, grid, load_states(system.states), load_lang(system.lang_dir))


def _write_set(out: Path, subset: str, data_dir: Path, words: Words, grid: Sequence[LmScale]) -> None:
    """Writes the CTM file of each scale."""
    segments = {segment.id: segment for segment in read_supervisions(data_dir, subset)}
    (out / "ctm").mkdir(exist_ok=True)
    for k, scale in enumerate(grid):
        found = {utterance: scales[k] for utterance, scales in words.items()}
        write_ctm(out / "ctm" / ctm_name(subset, scale), segments, found)
