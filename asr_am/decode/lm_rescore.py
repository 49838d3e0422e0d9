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
from itertools import islice
from pathlib import Path

from asr_am.data.manifests import read_supervisions
from asr_am.data.textfile import write_lines
from asr_am.decode.ctm import CtmWord, Words, write_words
from asr_am.decode.dev_choice import choose_on_dev, read_reference
from asr_am.decode.hypotheses import hypotheses
from asr_am.decode.lattice import Lattice, LmScale, read_lattices
from asr_am.decode.lattice_rescore import LatticeModels, LatticeOptions
from asr_am.decode.lattice_rescore import rescore as rescore_lattice
from asr_am.decode.lm_mixture import LmMixture, fit_weight
from asr_am.decode.loading import load_lang, load_states
from asr_am.decode.system import System
from asr_am.errors import InputError
from asr_am.lang.arpa import read_arpa
from asr_am.lang.lang_dir import vocabulary
from asr_am.lang.ngram_automaton import NgramAutomaton
from asr_am.models.device import choose_device
from asr_am.models.lm_file import load_lm
from asr_am.parallel import parallel_map

log = logging.getLogger(__name__)

BATCH = 256  # lattices in memory at once


def rescore(
    decoded: Path, data_dir: Path, arpa: Path, lm: Path, out: Path, *, grid: Sequence[LmScale],
    how: LatticeOptions, jobs: int, device: str = "auto", dev_arpa: Path | None = None,
) -> None:  # fmt: skip
    """Rescores dev and test of a decoding run. Writes the CTM files, best_on_dev.json and rescore.json.

    Args:
        arpa: the n-gram LM that the run used.
        lm: checkpoint of the recurrent LM.
        grid: LM scales to write CTM files of dev for.
        device: where the recurrent LM scores sentences, see `choose_device`. Lattices are rescored on the CPU.
        dev_arpa: the n-gram LM that dev was decoded with, None: the same.

    Raises:
        InputError: a file is missing or damaged.
    """
    lang = load_lang(System.load(decoded).lang_dir)
    lstm, units, _ = load_lm(lm)
    lstm.to(choose_device(device))
    ngram = read_arpa(arpa)
    ngrams = {"dev": read_arpa(dev_arpa) if dev_arpa else ngram, "test": ngram}
    mixtures, perplexities = fit_weight(
        {subset: LmMixture(each, lstm, units) for subset, each in ngrams.items()}, data_dir, vocabulary(lang.words)
    )
    lstm.cpu()  # forked processes cannot use the GPU
    report: dict[str, object] = {"weight": round(mixtures["test"].weight, 4)}

    def write_set(subset: str, scales: Sequence[LmScale]) -> None:
        words = rescore_lattices(decoded, subset, mixtures[subset], scales, how, jobs)
        segments = {segment.id: segment for segment in read_supervisions(data_dir, subset)}
        write_words(out, subset, segments, scales, words)

    for subset in ("dev", "test"):
        write_set(subset, grid)
        record: dict[str, object] = {"perplexity": asdict(perplexities[subset])}
        if subset == "dev":
            reference = read_reference(data_dir, subset)
            choice = choose_on_dev(reference, out, subset, grid, jobs, partial(write_set, subset))
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
    path = decoded / "lattices" / f"{subset}.ark"
    found: Words = {}
    lattices = read_lattices(path)
    while part := list(islice(lattices, BATCH)):
        results = parallel_map(work, [lattice for _, lattice in part], jobs, f"rescoring {subset}", here=True)
        found |= zip((name for name, _ in part), results, strict=True)
    if not found:
        raise InputError(f"{path}: has no lattices; run stage 7 (decode) again")
    return found


def _rescored_words(
    models: LatticeModels, system: System, grid: Sequence[LmScale], options: LatticeOptions, lattice: Lattice
) -> list[list[CtmWord]]:
    rescored = Lattice.from_arrays(rescore_lattice(lattice, models, system.lm_scale, options))
    return hypotheses(rescored, grid, load_states(system.states), load_lang(system.lang_dir))
