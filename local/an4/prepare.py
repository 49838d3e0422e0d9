"""Prepares CMU AN4 as a data directory: wav files, lhotse manifests, NIST references, lexicon and LM text.

    python -m local.an4.prepare --data-dir DIR --out DIR

Uses the official split (948 training utterances, 130 test utterances with 773 words) and holds out seven training
speakers as dev. The README of the corpus says little-endian, but the samples of `an4_raw.bigendian` are big-endian.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import sys
from collections.abc import Collection
from pathlib import Path

import numpy as np
import soundfile
from lhotse import AudioSource, Recording, SupervisionSegment

from asr_am import disk
from asr_am.data.download import download
from asr_am.data.manifests import write_set
from asr_am.data.stm import write_reco2file_and_channel, write_stm
from asr_am.data.textfile import write_lines
from asr_am.errors import InputError
from local.an4.source import ARCHIVES, DIGEST, MAX_BYTES, REMEDY, URL, digest, find_source, read_source
from local.an4.text import Utterance, read_lexicon, read_utterances, text_file

logger = logging.getLogger(__name__)

SAMPLING_RATE = 16000
DEV_SPEAKERS = ("fclc", "flrp", "ftmj", "mblb", "mdxn", "mjes", "mnfe")  # three women, four men
TRAIN_UTTERANCES, TEST_UTTERANCES, TEST_WORDS = 948, 130, 773  # the official split

# Speech changes slowly between samples: over a file, the standard deviation of the steps between samples is about 0.5
# times that of the samples (0.16 to 1.22 in this corpus). With swapped bytes it is that of white noise, about 1.3
# (1.02 to 1.39). The byte order is wrong if only the swapped version is below 1.
NOISE_STEP = 1.0


def prepare(out: Path, *, data_dir: Path | str | None, jobs: int = 1) -> None:
    """Writes the data directory.

    Args:
        out: output directory.
        data_dir: archive, folder with it, or unpacked tree. By default the archive is downloaded from the corpus' site.
        jobs: ignored, because the archive is one stream.

    Raises:
        InputError: something is missing, truncated, or in the wrong byte order.
    """
    out.mkdir(parents=True, exist_ok=True)
    if data_dir is None:
        archive = out / ARCHIVES[0]
        if not archive.is_file():
            download(URL, archive, REMEDY, max_bytes=MAX_BYTES)
        try:
            etc, num_samples = convert(archive, out / "wav", expected=DIGEST)
        finally:
            disk.remove(archive)  # even if damaged, so that the next run downloads it again
    else:
        etc, num_samples = convert(find_source(Path(data_dir)), out / "wav")
    utterances = split(read_utterances(etc, "train"), read_utterances(etc, "test"))
    for subset, members in utterances.items():
        write_subset(out, subset, members, num_samples)
    write_language(out, etc, utterances["train"])


def convert(source: Path, wav_dir: Path, expected: str | None = None) -> tuple[dict[str, bytes], dict[str, int]]:
    """Writes the raw files of `source` as `wav_dir/<speaker>/<utterance>.wav`.

    Args:
        source: archive, or root of the unpacked tree.
        wav_dir: folder of the wav files.
        expected: the `digest` that the files must have, None for any.

    Returns:
        The text files by their path in the distribution, and the number of samples of each raw file by its path.

    Raises:
        InputError: the archive is broken, a file has no samples, or the files have another digest.
    """
    found: dict[str, str] = {}
    etc: dict[str, bytes] = {}
    num_samples: dict[str, int] = {}
    for name, contents in read_source(source):
        found[name] = hashlib.sha256(contents).hexdigest()
        if name.startswith("etc/"):
            etc[name] = contents
        elif name.endswith(".raw") and name.count("/") == 3:  # wav/<part>/<speaker>/<utterance>.raw
            samples = decode_raw(contents, f"{source}: {name}")
            target = wav_path(wav_dir, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            soundfile.write(target, samples, SAMPLING_RATE, subtype="PCM_16")
            num_samples[name] = len(samples)
    if expected not in (None, digest(found)):
        raise InputError(f"{source}: its files are not those of the official corpus (checksum); {REMEDY}")
    return etc, num_samples


def wav_path(wav_dir: Path, raw: str) -> Path:
    """Returns the path of the wav file of `wav/<part>/<speaker>/<utterance>.raw`."""
    _, speaker, name = raw.rsplit("/", maxsplit=2)
    return wav_dir / speaker / f"{name.removesuffix('.raw')}.wav"


def decode_raw(contents: bytes, where: str) -> np.ndarray:
    """Decodes big-endian PCM to int16 samples [N].

    Raises:
        InputError: the file is empty, truncated or byte-swapped.
    """
    if len(contents) < 2 or len(contents) % 2:
        raise InputError(f"{where}: {len(contents)} bytes are not a whole number of 16-bit samples; {REMEDY}")
    samples = np.frombuffer(contents, dtype=">i2").astype(np.int16)
    if _step(samples) > NOISE_STEP > _step(samples.byteswap()):
        raise InputError(f"{where}: full-scale noise when read as big-endian samples, so it is little-endian; {REMEDY}")
    return samples


def _step(samples: np.ndarray) -> float:
    """Returns the standard deviation of the steps between samples, relative to that of the samples."""
    deviation = samples.astype(np.float64).std()
    return float(np.diff(samples.astype(np.float64)).std() / deviation) if len(samples) > 1 and deviation else 0.0


def split(train: list[Utterance], test: list[Utterance]) -> dict[str, list[Utterance]]:
    """Returns the sets train, dev and test.

    Raises:
        InputError: the corpus is incomplete.
    """
    counts = (len(train), len(test), sum(len(utterance.text.split()) for utterance in test))
    if counts != (TRAIN_UTTERANCES, TEST_UTTERANCES, TEST_WORDS):
        raise InputError(
            f"AN4: {counts[0]} training utterances, {counts[1]} test utterances and {counts[2]} test words instead of "
            f"{TRAIN_UTTERANCES}, {TEST_UTTERANCES} and {TEST_WORDS}: not the official corpus; {REMEDY}"
        )
    missing = set(DEV_SPEAKERS) - {utterance.speaker for utterance in train}
    if missing:
        raise InputError(f"AN4: the training set lacks the dev speakers {sorted(missing)}; {REMEDY}")
    return {
        "train": [utterance for utterance in train if utterance.speaker not in DEV_SPEAKERS],
        "dev": [utterance for utterance in train if utterance.speaker in DEV_SPEAKERS],
        "test": test,
    }


def write_subset(out: Path, subset: str, utterances: list[Utterance], num_samples: dict[str, int]) -> None:
    """Writes the manifests of one set and, for dev and test, the NIST reference."""
    recordings, supervisions = [], []
    for utterance in utterances:
        if utterance.audio not in num_samples:
            raise InputError(f"{utterance.audio}: listed in etc/ but missing from the corpus; {REMEDY}")
        recording = _recording(utterance, wav_path(out / "wav", utterance.audio), num_samples[utterance.audio])
        recordings.append(recording)
        supervisions.append(_supervision(utterance, recording))
    write_set(out, subset, recordings, supervisions)
    if subset != "train":
        write_stm(out / subset / "ref.stm", supervisions, label=lambda segment: f"O,{segment.gender}")
        write_reco2file_and_channel(out / subset / "reco2file_and_channel", supervisions)


def _recording(utterance: Utterance, wav: Path, num_samples: int) -> Recording:
    source = AudioSource(type="file", channels=[0], source=str(wav))
    return Recording(utterance.name, [source], SAMPLING_RATE, num_samples, num_samples / SAMPLING_RATE)


def _supervision(utterance: Utterance, recording: Recording) -> SupervisionSegment:
    return SupervisionSegment(
        id=utterance.id,
        recording_id=recording.id,
        start=0.0,
        duration=recording.duration,
        channel=0,
        text=utterance.text,
        language="English",
        speaker=utterance.speaker,
        gender=utterance.speaker[0].upper(),  # the corpus names its speakers f... and m...
    )


def write_language(out: Path, etc: dict[str, bytes], train: Collection[Utterance]) -> None:
    """Writes the lexicon, the unigram LM of the corpus, and the LM text. Dev is left out because LM weights are tuned
    on it.
    """
    (out / "lm").mkdir(exist_ok=True)
    (out / "lm" / "ug.arpa").write_text(text_file(etc, "etc/an4.ug.lm"), encoding="utf-8")
    write_lines(out / "lm" / "train.txt", [utterance.text for utterance in train])
    lexicon = read_lexicon(etc)
    write_lines(out / "lexicon.txt", lexicon)
    logger.info("%s: %d pronunciations, %d LM sentences", out, len(lexicon), len(train))


def main() -> None:
    parser = argparse.ArgumentParser(description="Prepare CMU AN4.")
    parser.add_argument("--data-dir", type=Path, help="archive, folder with it, or unpacked tree (default: download)")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        prepare(arguments.out, data_dir=arguments.data_dir)
    except InputError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
