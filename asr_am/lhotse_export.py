"""Writes a corpus as lhotse manifests: `python -m asr_am.lhotse_export --exp exp/an4 --system sat --out DIR`.

    DIR/<set>/recordings.jsonl.gz
    DIR/<set>/supervisions.jsonl.gz    with the system's alignments as `word` and `phone`, for sets that are aligned
    DIR/<set>/features_<kind>.jsonl.gz    MFCCs and log-mel energies in the archives of exp/<corpus>/features
    DIR/<set>/cuts_<kind>.jsonl.gz        all of these together, for CutSet.from_file: a cut per utterance, which ends
                                          with its last frame

lhotse manifests of your own are training data with recipes/kaldi/run.sh --train.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lhotse import CutSet, Features, FeatureSet, MonoCut, RecordingSet, SupervisionSet
from lhotse.supervision import AlignmentItem, SupervisionSegment

from asr_am.data.kaldi_archive import read_scp
from asr_am.data.manifests import channel_of, read_recordings, read_supervisions
from asr_am.data.ownership import check_own_dir, mark_own_dir
from asr_am.data.textfile import write_lines
from asr_am.decode.aligned import aligned_phones, aligned_words
from asr_am.decode.ctm import FRAME_SHIFT, CtmWord
from asr_am.errors import InputError
from asr_am.features.kinds import REMEDY, read_kind
from asr_am.features.reader import FeatureReader
from asr_am.hmm.alignments import read_alignments
from asr_am.hmm.gmm_system import GmmSystem
from asr_am.hmm.states import StateTable
from asr_am.lang.lang_dir import Lang
from asr_am.score.cli import exit_code

COMMAND = "asr_am.lhotse_export"
KINDS = ("mfcc", "logmel")


def export(root: Path, system: str | None, out: Path) -> list[Path]:
    """Writes the manifests, with the alignments of a system if one is named. Returns the directory of each set.

    Raises:
        InputError: there are no manifests or no such system, or the directory of a set has files of the user or is in
            the output of a stage.
    """
    sets = sorted(path.parent.name for path in (root / "data").glob("*/supervisions.jsonl.gz"))
    if not sets:
        raise InputError(f"{root / 'data'}: has no manifests; run stage 0 (data)")
    folder_of_system = GmmSystem.find(root / "align", system) if system is not None else None
    for subset in sets:
        check_own_dir(out / subset, COMMAND)
    written = []
    for subset in sets:
        folder = out / subset
        mark_own_dir(folder, COMMAND)
        recordings = read_recordings(root / "data", subset, allow_commands=True)  # no audio is read here
        supervisions = read_supervisions(root / "data", subset)
        if folder_of_system and (folder_of_system / "ali" / f"{subset}.ark").is_file():
            supervisions = with_alignments(root, folder_of_system, subset, supervisions)
        recordings.to_file(folder / "recordings.jsonl.gz")
        supervisions.to_file(folder / "supervisions.jsonl.gz")
        for kind in KINDS:
            if (root / "features" / kind / f"{subset}.scp").is_file():
                features = feature_set(root, kind, subset, supervisions, folder / f"features_{kind}.scp")
                features.to_file(folder / f"features_{kind}.jsonl.gz")
                cuts_of(recordings, supervisions, features).to_file(folder / f"cuts_{kind}.jsonl.gz")
        written.append(folder)
    return written


def with_alignments(root: Path, folder: Path, subset: str, supervisions: SupervisionSet) -> SupervisionSet:
    """Returns the supervisions with the words and phones of the alignments of a system, which is in `folder`."""
    lang = Lang.load(root / "lang")
    states = StateTable.load(folder / "states.npz")
    by_id = {segment.id: segment for segment in supervisions}
    for utterance, labels_T in read_alignments(folder / "ali", subset):
        segment = by_id[utterance]
        parts = {
            "word": aligned_words(segment.text or "", labels_T, states, lang),
            "phone": aligned_phones(labels_T, states, lang),
        }
        items = {name: [_item(segment, word) for word in words] for name, words in parts.items()}
        by_id[utterance] = segment.with_alignment("word", items["word"]).with_alignment("phone", items["phone"])
    return SupervisionSet.from_segments(by_id.values())


def _item(segment: SupervisionSegment, word: CtmWord) -> AlignmentItem:
    start = segment.start + FRAME_SHIFT * word.start
    return AlignmentItem(word.word, round(start, 4), round(FRAME_SHIFT * word.frames, 4))


def feature_set(root: Path, kind: str, subset: str, supervisions: SupervisionSet, index: Path) -> FeatureSet:
    """Returns manifests of the features of each utterance, without CMVN and deltas.

    Writes `index`, an .scp file with absolute paths. Those of exp/<corpus> are relative.
    """
    folder = (root / "features" / kind).absolute()
    options, reader = read_kind(folder), FeatureReader(root / "features", kind, subset)
    places = read_scp(folder / f"{subset}.scp", REMEDY)
    write_lines(index, [f"{name} {Path(place.path).absolute()}:{place.offset}" for name, place in places.items()])
    by_id = {segment.id: segment for segment in supervisions}
    features = []
    for utterance in reader.utterances:
        segment, (frames, size) = by_id[utterance], reader.raw(utterance).shape
        features.append(
            Features(
                type="kaldi-fbank" if kind == "logmel" else "kaldi-mfcc", num_frames=frames, num_features=size,
                frame_shift=FRAME_SHIFT, sampling_rate=options.sampling_rate, start=segment.start,
                duration=round(frames * FRAME_SHIFT, 6),  # lhotse requires exactly num_frames * frame_shift
                storage_type="kaldiio", storage_path=str(index.absolute()), storage_key=utterance,
                recording_id=segment.recording_id, channels=channel_of(segment),
            )
        )  # fmt: skip
    return FeatureSet.from_features(features)


def cuts_of(recordings: RecordingSet, supervisions: SupervisionSet, features: FeatureSet) -> CutSet:
    """Returns a cut for the features of each utterance.

    Supervisions end with their cut: lhotse refuses others in training, and CutSet.from_manifests leaves them out.
    Alignments keep the times of the recording, as in any cut of lhotse's.
    """
    by_id = {segment.id: segment for segment in supervisions}
    cuts = []
    for found in features:
        segment = by_id[found.storage_key]
        inside = replace(segment, start=0.0, duration=min(segment.duration, found.duration))
        place = found.start, found.duration, channel_of(segment)
        cuts.append(MonoCut(segment.id, *place, [inside], found, recordings[segment.recording_id]))
    return CutSet.from_cuts(cuts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns its exit code: 0, or 1 after one line on stderr."""
    parser = argparse.ArgumentParser(prog=f"python -m {COMMAND}", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--exp", type=Path, required=True, metavar="DIR", help="output of a recipe: exp/<corpus>")
    parser.add_argument("--system", help="GMM system whose alignments to add")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write into")
    options = parser.parse_args(arguments)

    def work() -> None:
        for path in export(options.exp, options.system, options.out):
            print(path)

    return exit_code(COMMAND, work)


if __name__ == "__main__":
    sys.exit(main())
