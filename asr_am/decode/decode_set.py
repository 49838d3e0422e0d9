"""Stage decode: decodes dev and test, with LM weight, insertion penalty and window chosen on dev.

Writes for each set:
    lattices/<set>.ark: raw lattices.
    nbest/<set>.txt: utterance, graph cost, acoustic cost, words. Best first.
    ctm/<set>_<LM weight>_<insertion penalty>.ctm: the words. On dev for every LM scale of the grid, on other sets for
        the one that is chosen on dev.
and decode.json (chosen window and scale, costs and failures), best_on_dev.json and system.json.

What is chosen is what is scored: window and LM scale have the fewest errors on dev as stage score counts them
(`asr_am.decode.dev_choice`).
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lhotse import SupervisionSegment

from asr_am import disk
from asr_am.data.manifests import read_supervisions
from asr_am.decode.ctm import FRAME_SHIFT, ctm_name, write_ctm
from asr_am.decode.dev_choice import DevChoice, choose_on_dev, read_reference
from asr_am.decode.lattice import LmScale
from asr_am.decode.scorer import Window
from asr_am.decode.shards import Decoded, DecodeOptions, Job, decode_shards, read_shards
from asr_am.decode.system import System
from asr_am.errors import InputError
from asr_am.features.fusion import InputReader
from asr_am.score.scoring import Reference

log = logging.getLogger(__name__)

Segments = Mapping[str, SupervisionSegment]

WORK = "shards"  # folder of finished shards, removed at the end


def reference_words(text: str, dropped: frozenset[str]) -> list[str]:
    """Returns the words of a transcript that are scored: those that CTM files do not leave out."""
    return [word for word in text.split() if word not in dropped]


def decode_sets(
    system: System, data_dir: Path, out: Path, options: DecodeOptions, *, sets: Sequence[str] = ("dev", "test"),
    windows: Sequence[Window] = (), jobs: int = 1,
) -> System:  # fmt: skip
    """Decodes sets with the scales and the window that are best on dev.

    Args:
        system: the system to decode with. Its search options are replaced by those of `options`.
        data_dir: output of stage data.
        out: output folder.
        options: search options, grid of LM scales, length of n-best lists.
        sets: names of the sets, the dev set first.
        windows: windows to try for a network. The one with the fewest dev errors is kept (of equals the first). If
            empty, the system's own window is used.
        jobs: number of processes.

    Returns:
        The system with the chosen window and scale, as saved in `out`.
    """
    dev, *others = sets
    system = replace(system, search=options.search)
    segments = decodable(system, data_dir, dev)
    tried = windows if system.model is not None and windows else [system.window]
    # Words are read again from the shards of the best window: under every scale they are 0.6 GB for 5 hours of dev.
    reference = read_reference(data_dir, dev)
    choices = {
        window: _decode_dev(replace(system, window=window), dev, segments, reference, out, options, jobs)
        for window in tried
    }
    window, choice = min(choices.items(), key=lambda item: item[1].errors)
    choice.save(out)
    system = replace(system, window=window, lm_scale=choice.scale)
    report: dict[str, Any] = {"windows": {str(window): choice.errors for window, choice in choices.items()}}
    report |= {"chosen": {"window": str(window), **choice.scale._asdict(), "dev_errors": choice.errors}}
    report |= {dev: write_set(out, dev, segments, options.grid, _shard_folder(out, dev, system))}
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
    """Returns the utterances of a set that have features, by id.

    Raises:
        InputError: none of them has features.
    """
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
    """Decodes dev, writes its words under each LM scale, and returns the best scale."""
    write_words(out, dev, segments, options.grid, read_shards(_decode(system, dev, segments, out, options, jobs)))
    choice = choose_on_dev(reference, out, dev, options.grid, jobs)
    log.info(
        "%s, window %s: %d errors in %d words (%.2f %%) at LM weight %g, insertion penalty %g", dev, system.window,
        choice.errors, choice.words, 100 * choice.errors / max(1, choice.words), *choice.scale,
    )  # fmt: skip
    return choice


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
    return out / WORK / f"{subset}_{str(system.window).replace('/', '-')}"


def write_set(out: Path, subset: str, segments: Segments, grid: Sequence[LmScale], shards: Path) -> dict[str, Any]:
    """Writes lattices, n-best lists and CTM files of a set.

    Args:
        out: output folder.
        subset: name of the set.
        segments: its utterances by id.
        grid: the LM scales it was decoded with.
        shards: folder of the finished shards.

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
    write_words(out, subset, segments, grid, results)
    lines = [
        f"{d.utterance} {entry.graph} {entry.acoustic} {' '.join(entry.words)}".rstrip() + "\n"
        for d in results
        for entry in d.nbest
    ]
    (out / "nbest" / f"{subset}.txt").write_text("".join(lines), encoding="utf-8")
    return statistics(subset, results)


def write_words(
    out: Path, subset: str, segments: Segments, grid: Sequence[LmScale], results: Sequence[Decoded]
) -> None:
    """Writes a CTM file for each LM scale."""
    (out / "ctm").mkdir(parents=True, exist_ok=True)
    for k, scale in enumerate(grid):
        write_ctm(out / "ctm" / ctm_name(subset, scale), segments, {d.utterance: d.words[k] for d in results})


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
