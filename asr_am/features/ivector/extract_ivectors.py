"""Stage `ivectors`: trains UBM and extractor on set `train`, and writes the i-vectors of all sets.

Writes options.json, ubm.npz, extractor.npz, training.json (log-likelihoods per frame before each update) and the
i-vectors (see `ivector_archive`). A killed run resumes from `work/`. The output does not depend on the number of jobs.

Memory does not depend on the amount of speech: the UBM is trained on a sample of the frames, the extractor on
statistics that are read block by block, and i-vectors are written by groups of speakers.

Shapes: N frames, K segments, B speakers, S dimensions of the i-vector.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from torch import Tensor

from asr_am import disk
from asr_am.data.kaldi_archive import write_archive
from asr_am.data.textfile import load_json, read_lines, write_lines
from asr_am.errors import InputError
from asr_am.features.ivector.estimator import Estimator, split_speaker
from asr_am.features.ivector.ivector_archive import REMEDY, IvectorInfo
from asr_am.features.ivector.model_files import load_extractor, load_ubm, save_extractor, save_ubm
from asr_am.features.ivector.speech import Speech
from asr_am.features.ivector.train_extractor import LIKELIHOODS, IvectorOptions, train_extractor, write_statistics
from asr_am.features.ivector.ubm import train_ubm
from asr_am.parallel import parallel_map

OPTIONS = "options.json"
ARCHIVE = 500  # utterances per archive. Speakers are not divided.


def make_ivectors(
    features_dir: Path, out: Path, options: IvectorOptions, *, sets: Sequence[str], jobs: int = 1, device: str = "cpu",
) -> None:  # fmt: skip
    """Trains the models and writes the i-vectors of `sets`.

    Args:
        features_dir: output of stage features, with MFCCs.
        jobs: worker processes. One is used where the device is a GPU.

    Raises:
        InputError: there is too little speech for the sizes, or `options.online` names an unknown set.
    """
    if unknown := set(options.online) - set(sets):
        raise InputError(f"ivectors.online: {min(unknown)!r} is not one of the sets {', '.join(sets)}; correct it")
    jobs, scratch = (1 if device != "cpu" else jobs), out / "work"
    speech = {subset: Speech(features_dir, subset, options.normalise, device) for subset in ("train", *sets)}
    options.check_enough(speech["train"].reader.num_frames, len(speech["train"].reader.utterances))
    scratch.mkdir(parents=True, exist_ok=True)
    write_lines(out / OPTIONS, [json.dumps(asdict(options), indent=1)])
    train_models(speech["train"], out, scratch, options, jobs)
    for subset in sets:
        write_ivectors(
            speech[subset].by_speaker(), subset, out, partial(write_group, speech[subset], options, out), jobs
        )
    keys = {subset: "utterance" if subset in options.online else "speaker" for subset in sets}
    IvectorInfo(options.dim, options.period, keys).save(out)
    disk.remove(scratch)


def train_models(speech: Speech, out: Path, work: Path, options: IvectorOptions, jobs: int) -> None:
    """Writes ubm.npz, extractor.npz and training.json, unless they exist."""
    ubm_path, extractor_path, report = out / "ubm.npz", out / "extractor.npz", out / "training.json"
    if not ubm_path.exists():
        frames_ND = speech.sample(options.ubm_frames)
        ubm, likelihoods = train_ubm(frames_ND, options.gaussians, options.ubm_iterations, seed=options.seed)
        write_lines(report, [json.dumps({"ubm": likelihoods})])
        save_ubm(ubm_path, ubm)
    if not extractor_path.exists():
        blocks = write_statistics(speech, ubm_path, work, options.posterior_scale, jobs)
        extractor = train_extractor(blocks, work, options, jobs, speech.device)
        likelihoods = json.loads((work / LIKELIHOODS).read_text())
        write_lines(report, [json.dumps(json.loads(report.read_text()) | {"extractor": likelihoods})])
        save_extractor(extractor_path, extractor)


Group = list[tuple[str, list[str]]]  # speakers with their utterances


def write_ivectors(
    speakers: Mapping[str, list[str]], subset: str, out: Path, work: Callable[[tuple[Path, Group]], None], jobs: int
) -> None:
    """Writes the archives of one set, which exist in part if a run was killed, and their common index.

    Args:
        work: writes the archive of a group of speakers, with its index, under the name it is given.
    """
    groups: list[Group] = [[]]
    for speaker, utterances in speakers.items():
        if sum(len(members) for _, members in groups[-1]) >= ARCHIVE:
            groups.append([])
        groups[-1].append((speaker, utterances))
    tasks = [(out / f"{subset}_ivectors.{n}", group) for n, group in enumerate(groups, start=1)]
    missing = [task for task in tasks if not _index(task[0], "scp").exists()]
    parallel_map(work, missing, jobs, f"i-vectors of {subset}")
    for kind in ("crc32", "scp"):
        lines = [line for path, _ in tasks for line in read_lines(_index(path, kind), REMEDY)]
        write_lines(out / f"{subset}_ivectors.{kind}", sorted(lines))
    for path, _ in tasks:
        disk.remove(_index(path, "scp"))
        disk.remove(_index(path, "crc32"))


def _index(path: Path, kind: str) -> Path:
    return path.with_name(f"{path.name}.{kind}")


def write_group(speech: Speech, options: IvectorOptions, out: Path, task: tuple[Path, Group]) -> None:
    """Writes the i-vectors of a group of speakers as one archive."""
    path, group = task
    estimate = load_estimator(out, speech.device)
    rows: dict[str, Tensor] = {}
    if speech.subset in options.online:
        for _, utterances in group:
            for part in split_speaker(utterances, options.online_utterances):
                rows |= zip(part, estimate.online(map(speech.frames, part)), strict=True)
    else:
        found_BS = estimate.offline(map(speech.frames, utterances) for _, utterances in group)
        rows |= zip((speaker for speaker, _ in group), found_BS[:, None], strict=True)
    write_archive(out, path.name, ((key, rows_KS.float().cpu().numpy()) for key, rows_KS in sorted(rows.items())))


def speaker_ivectors(
    models: Path, features_dir: Path, subset: str, out: Path, estimator: Estimator | None = None
) -> None:
    """Writes one i-vector per speaker of a new set.

    Args:
        models: folder written by `make_ivectors`.
        estimator: the loaded models. If None, they are loaded from `models`.
    """
    options, estimate = load_options(models), estimator or load_estimator(models)
    speech = Speech(features_dir, subset, options.normalise)
    speakers = speech.by_speaker()
    found_BS = estimate.offline(map(speech.frames, utterances) for utterances in speakers.values())
    rows = {speaker: row_S[None].float().numpy() for speaker, row_S in zip(speakers, found_BS, strict=True)}
    write_archive(out, f"{subset}_ivectors", sorted(rows.items()))
    IvectorInfo(options.dim, options.period, {subset: "speaker"}).save(out)


def load_estimator(folder: Path, device: str = "cpu") -> Estimator:
    """Loads the models in `folder`. Raises InputError if a file is missing or damaged."""
    options = load_options(folder)
    ubm, extractor = load_ubm(folder / "ubm.npz").to(device), load_extractor(folder / "extractor.npz").to(device)
    return Estimator(ubm, extractor, options.posterior_scale, options.max_count, options.period)


def load_options(folder: Path) -> IvectorOptions:
    """Loads the options of the models in `folder`. Raises InputError if the file is missing or damaged."""
    path = folder / OPTIONS
    try:
        return IvectorOptions(**load_json(path))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path}: missing or damaged ({error}); {REMEDY}") from error
