"""Stage decode: decodes dev and test, with LM weight, insertion penalty, window and network chosen on dev.

Writes for each set:
    lattices/<set>.ark: raw lattices.
    nbest/<set>.txt: utterance, graph cost, acoustic cost, words. Best first.
    ctm/<set>_<LM weight>_<insertion penalty>.ctm: the words. On dev for every LM scale that was tried, on other sets
        for the one that is chosen on dev.
and decode.json (what was tried and chosen, costs and failures), best_on_dev.json and system.json.

What is chosen is what is scored: network, window and LM scale have the fewest errors on dev as stage score counts them
(`asr_am.decode.dev_choice`). So sequence training that makes more errors on dev is not decoded with.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lhotse import SupervisionSegment

from asr_am import disk
from asr_am.data.manifests import read_supervisions
from asr_am.decode.ctm import FRAME_SHIFT, Words, write_words
from asr_am.decode.dev_choice import DevChoice, choose_on_dev, read_reference
from asr_am.decode.hypotheses import hypotheses
from asr_am.decode.lattice import LmScale, read_lattices
from asr_am.decode.loading import load_lang, load_states
from asr_am.decode.shards import Decoded, DecodeOptions, Job, decode_shards, read_shards
from asr_am.decode.system import System
from asr_am.errors import InputError
from asr_am.features.fusion import InputReader
from asr_am.parallel import parallel_map
from asr_am.score.scoring import Reference

log = logging.getLogger(__name__)

Segments = Mapping[str, SupervisionSegment]

WORK = "shards"  # folder of finished shards, removed at the end


def reference_words(text: str, dropped: frozenset[str]) -> list[str]:
    """Returns the words of a transcript that are scored: those that CTM files do not leave out."""
    return [word for word in text.split() if word not in dropped]


def decode_sets(
    system: System, data_dir: Path, out: Path, options: DecodeOptions, *, sets: Sequence[str] = ("dev", "test"),
    candidates: Sequence[System] = (), jobs: int = 1, rival: tuple[System, DevChoice] | None = None,
) -> System:  # fmt: skip
    """Decodes sets with the LM scale, window and network that are best on dev.

    Args:
        system: the system to decode with. Its search options are replaced by those of `options`.
        sets: names of the sets, the dev set first.
        candidates: the system with other windows or networks. The one with the fewest dev errors is kept (of equals the
            first). If empty, it is `system`.
        rival: another system and what was chosen for it. It is taken instead if it makes fewer dev errors.

    Returns:
        The system with the chosen network, window and scale, as saved in `out`.
    """
    dev, *others = sets
    tried = [replace(candidate, search=options.search) for candidate in candidates or [system]]
    segments = decodable(system, data_dir, dev)
    # Words are read again from the shards of the best candidate: under every scale they are 0.6 GB for 5 hours of dev.
    reference = read_reference(data_dir, dev)
    choices = [_decode_dev(candidate.on_dev, dev, segments, reference, out, options, jobs) for candidate in tried]
    if rival and rival[1].errors < min(choice.errors for choice in choices):
        tried.append(replace(rival[0], search=options.search))
        choices.append(_decode_dev(tried[-1].on_dev, dev, segments, reference, out, options, jobs))
    best = min(range(len(tried)), key=lambda k: choices[k].errors)
    system, choice = replace(tried[best], lm_scale=choices[best].scale), choices[best]
    on_dev = system.on_dev
    if len({candidate.model for candidate in tried}) > 1:
        log.info("%s: fewest errors, %d, with the network of %s", dev, choice.errors, on_dev.network)
    choice.save(out)
    report: dict[str, Any] = {"tried": [
        {"network": candidate.on_dev.network, "window": str(candidate.window), "errors": each.errors}
        for candidate, each in zip(tried, choices, strict=True)
    ]}  # fmt: skip
    chosen = {"network": system.network, "window": str(system.window)}
    report |= {"chosen": chosen | choice.scale._asdict() | {"dev_errors": choice.errors}}
    folder = _shard_folder(out, dev, on_dev)
    disk.remove(out / "ctm")  # of a run that was killed after this
    (folder / "ctm").rename(out / "ctm")
    report[dev] = write_set(out, dev, segments, (), folder)
    options = replace(options, grid=(choice.scale,))
    for subset in others:
        segments = decodable(system, data_dir, subset)
        folder = _decode(system, subset, segments, out, options, jobs)
        report[subset] = write_set(out, subset, segments, options.grid, folder)
    (out / "decode.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    system.save(out)
    disk.remove(out / WORK)
    return system


def decodable(system: System, data_dir: Path, subset: str) -> Segments:
    """Returns the utterances of a set that have features, by id. Raises InputError if none has."""
    reader = InputReader(system.features_dir, system.feature_kind, subset)
    segments = {segment.id: segment for segment in read_supervisions(data_dir, subset)}
    lost = [utterance for utterance in segments if utterance not in reader]
    if lost:
        log.warning("%s: %d utterances have no features and are not decoded, e.g. %s", subset, len(lost), lost[0])
    if len(lost) == len(segments):
        raise InputError(
            f"{system.features_dir}: no features for any utterance of {subset}; run stage 2 (features) again"
        )
    return {utterance: segments[utterance] for utterance in sorted(segments) if utterance in reader}


def _decode_dev(
    system: System, dev: str, segments: Segments, reference: Reference, out: Path, options: DecodeOptions, jobs: int
) -> DevChoice:
    """Decodes dev, writes its words under each LM scale beside the shards, and returns the best scale."""
    folder = _decode(system, dev, segments, out, options, jobs)
    write_words(folder, dev, segments, options.grid, {d.utterance: d.words for d in read_shards(folder)})

    def write_more(scales: Sequence[LmScale]) -> None:
        write_words(folder, dev, segments, scales, words_of_lattices(system, folder, scales, jobs))

    choice = choose_on_dev(reference, folder, dev, options.grid, jobs, write_more)
    log.info(
        "%s, window %s: %d errors in %d words (%.2f %%) at LM weight %g, insertion penalty %g", dev, system.window,
        choice.errors, choice.words, 100 * choice.errors / max(1, choice.words), *choice.scale,
    )  # fmt: skip
    return choice


def words_of_lattices(system: System, shards: Path, scales: Sequence[LmScale], jobs: int) -> Words:
    """Returns the words under each LM scale of all utterances that have a lattice, made by `system`."""
    work = partial(_words_of_shard, system, scales)
    found = parallel_map(work, sorted(shards.glob("*.lat")), jobs, f"rescoring {shards.name}")
    return {utterance: words for part in found for utterance, words in part.items()}


def _words_of_shard(system: System, scales: Sequence[LmScale], archive: Path) -> Words:
    states, lang = load_states(system.states), load_lang(system.lang_dir)
    return {utterance: hypotheses(lattice, scales, states, lang) for utterance, lattice in read_lattices(archive)}


def _decode(system: System, subset: str, segments: Segments, out: Path, options: DecodeOptions, jobs: int) -> Path:
    """Decodes a set, and returns the folder of its shards."""
    job = Job(system.source(subset), system.graph, system.lang_dir, system.states, options, system.model)
    name = f"{subset} {system.window}" if system.model else subset
    folder = _shard_folder(out, subset, system)
    begin = time.monotonic()
    decode_shards(job, list(segments), folder, jobs, f"decoding {name}")
    log.info("%s: %d utterances in %.1f s", name, len(segments), time.monotonic() - begin)
    return folder


def _shard_folder(out: Path, subset: str, system: System) -> Path:
    network = f"_{system.network}" if system.network else ""
    return out / WORK / f"{subset}_{str(system.window).replace('/', '-')}{network}"


def write_set(out: Path, subset: str, segments: Segments, grid: Sequence[LmScale], shards: Path) -> dict[str, Any]:
    """Writes lattices, n-best lists and CTM files of a set.

    Args:
        grid: the LM scales it was decoded with and has no CTM files for yet.

    Returns:
        Statistics of the set, see `statistics`.
    """
    results = read_shards(shards)
    for name in ("nbest", "lattices"):
        (out / name).mkdir(exist_ok=True)
    with (out / "lattices" / f"{subset}.ark").open("wb") as archive:
        for shard in sorted(shards.glob("*.lat")):
            with shard.open("rb") as file:
                shutil.copyfileobj(file, archive)
    write_words(out, subset, segments, grid, {d.utterance: d.words for d in results})
    lines = [
        f"{d.utterance} {entry.graph} {entry.acoustic} {' '.join(entry.words)}".rstrip() + "\n"
        for d in results
        for entry in d.nbest
    ]
    (out / "nbest" / f"{subset}.txt").write_text("".join(lines), encoding="utf-8")
    return statistics(subset, results)


def statistics(subset: str, results: Sequence[Decoded]) -> dict[str, Any]:
    """Computes and logs cost and failures of a set.

    The real-time factor is worker seconds per second of speech.
    """
    frames = sum(d.frames for d in results)
    speech = max(FRAME_SHIFT, frames * FRAME_SHIFT)
    empty, partial = sum(d.empty for d in results), sum(not d.complete and not d.empty for d in results)
    value = {
        "utterances": len(results),
        "frames": frames,
        "real_time_factor": round(sum(d.seconds for d in results) / speech, 5),
        "lattice_arcs_per_frame": round(sum(d.density * d.frames for d in results) / max(1, frames), 1),
        "no_final_state": partial,
        "no_path": empty,
    }
    log.info(
        "%s: real-time factor %s, %s arcs per frame", subset, value["real_time_factor"], value["lattice_arcs_per_frame"]
    )
    if empty or partial:
        log.warning(
            "%s: %d utterances without a final state, %d without any path; try a wider beam", subset, partial, empty
        )
    return value
