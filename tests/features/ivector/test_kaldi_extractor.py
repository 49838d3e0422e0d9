"""I-vectors by an extractor of Kaldi's: its files byte by byte, and ivector-extract-online2 frame by frame."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from asr_am.decode.adhoc_features import write_recording
from asr_am.errors import InputError
from asr_am.features.extract import extract_features
from asr_am.features.ivector import kaldi_extractor, kaldi_ivectors
from asr_am.features.ivector.ivector_archive import IvectorReader
from asr_am.features.ivector.kaldi_extractor import read_extractor
from asr_am.features.reader import FeatureReader
from asr_am.features.spectral import SpectralOptions
from asr_am.stages import speaker
from tests.support.configurations import config
from tests.support.kaldi_bytes import (
    double,
    double_matrix,
    double_vector,
    integer,
    matrix,
    packed_matrix,
    token,
    vector,
)
from tests.support.manifest_corpus import RATE, write_corpus

CEPS, LEFT, RIGHT, FEATURES, GAUSSIANS, DIM, OFFSET = 13, 1, 2, 4, 7, 3, 5.0
WINDOW, SPEAKER_FRAMES, GLOBAL_FRAMES, REMEMBERED = 12, 8, 5, 20.0


class Model:
    """Parameters, the files that Kaldi would write, and its algorithm."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.weights_G = rng.dirichlet(np.ones(GAUSSIANS))
        self.means_GD = rng.normal(0, 1, (GAUSSIANS, FEATURES))
        self.vars_GD = rng.uniform(0.5, 2, (GAUSSIANS, FEATURES))
        self.loadings_GDS = rng.normal(0, 1, (GAUSSIANS, FEATURES, DIM))
        roots = rng.normal(0, 1, (GAUSSIANS, FEATURES, FEATURES))
        self.precisions_GDD = roots @ roots.swapaxes(1, 2) + np.eye(FEATURES)
        self.matrix = rng.normal(0, 0.1, (FEATURES, CEPS * (LEFT + 1 + RIGHT) + 1))
        self.everybody = np.append(1000 * rng.normal(0, 1, CEPS), 1000.0)

    def write(self, folder: Path) -> Path:
        folder.mkdir()
        precisions = [packed_matrix(x.tolist()) for x in self.precisions_GDD]
        (folder / "final.ie").write_bytes(
            b"\0B" + token("<IvectorExtractor>", "<w>") + double_matrix([]) + token("<w_vec>")
            + double_vector(self.weights_G.tolist()) + token("<M>") + integer(GAUSSIANS)
            + b"".join(double_matrix(x.tolist()) for x in self.loadings_GDS) + token("<SigmaInv>")
            + b"".join(precisions) + token("<IvectorOffset>") + double(OFFSET) + token("</IvectorExtractor>")
        )  # fmt: skip
        (folder / "final.dubm").write_bytes(
            b"\0B" + token("<DiagGMM>", "<GCONSTS>") + vector(*[0.0] * GAUSSIANS) + token("<WEIGHTS>")
            + vector(*self.weights_G) + token("<MEANS_INVVARS>") + matrix((self.means_GD / self.vars_GD).tolist())
            + token("<INV_VARS>") + matrix((1 / self.vars_GD).tolist()) + token("</DiagGMM>")
        )  # fmt: skip
        (folder / "final.mat").write_bytes(b"\0B" + matrix(self.matrix.tolist()))
        stats = [self.everybody, np.zeros_like(self.everybody)]
        lines = ["  " + " ".join(f"{value:g}" if value == 0 else repr(float(value)) for value in row) for row in stats]
        (folder / "global_cmvn.stats").write_text(" [\n" + "\n".join(lines) + " ]\n")
        (folder / "splice_opts").write_text(f"--left-context={LEFT} --right-context={RIGHT}\n")
        (folder / "online_cmvn.conf").write_text(
            f"# options\n--cmn-window={WINDOW} # frames\n--speaker_frames={SPEAKER_FRAMES}\n"
            f"--global-frames={GLOBAL_FRAMES}\n"
        )
        return folder

    def online(self, utterances: list[np.ndarray], normalised: bool = False) -> list[np.ndarray]:
        """What ivector-extract-online2 computes for a speaker, without batches (online-ivector-feature.cc)."""
        made, speaker = [], np.zeros(CEPS + 1)
        quadratic, linear, frames = np.eye(DIM), OFFSET * np.eye(DIM)[0], 0.0
        for x_TC in utterances:
            less_mean = np.stack([x - self._mean(x_TC, t, speaker) for t, x in enumerate(x_TC)])
            rows = []
            for t in range((len(x_TC) - 1) // 10 * 10 + 1):
                frame = self._transform(less_mean, t)
                source = frame if normalised else self._transform(x_TC, t)
                for g, weight in self._posteriors(frame):
                    weighted = self.loadings_GDS[g].T @ self.precisions_GDD[g]
                    linear = linear + weight * weighted @ source
                    quadratic = quadratic + weight * weighted @ self.loadings_GDS[g]
                    frames += weight
                if t % 10 == 0:
                    rows.append(np.linalg.solve(quadratic, linear) - OFFSET * np.eye(DIM)[0])
            made.append(np.stack(rows))
            speaker = speaker + np.append(x_TC.sum(axis=0), len(x_TC))
            speaker = speaker * min(1.0, REMEMBERED / speaker[-1])
            scale = min(1.0, REMEMBERED * 0.1 / frames)
            quadratic = scale * quadratic + (1 - scale) * np.eye(DIM)
            linear = scale * linear + (1 - scale) * OFFSET * np.eye(DIM)[0]
            frames *= scale
        return made

    def _mean(self, x_TC: np.ndarray, t: int, speaker: np.ndarray) -> np.ndarray:
        last = x_TC[max(0, t - WINDOW + 1) : t + 1]
        total, count = last.sum(axis=0), float(len(last))
        if speaker[-1] and count < WINDOW:
            taken = min(WINDOW - count, SPEAKER_FRAMES, speaker[-1])
            total, count = total + taken / speaker[-1] * speaker[:-1], count + taken
        if count < WINDOW:
            taken = min(WINDOW - count, GLOBAL_FRAMES)
            total, count = total + taken / self.everybody[-1] * self.everybody[:-1], count + taken
        return total / count

    def _transform(self, x_TC: np.ndarray, t: int) -> np.ndarray:
        parts = [x_TC[min(max(t + shift, 0), len(x_TC) - 1)] for shift in range(-LEFT, RIGHT + 1)]
        return self.matrix[:, :-1] @ np.concatenate(parts) + self.matrix[:, -1]

    def _posteriors(self, frame: np.ndarray) -> list[tuple[int, float]]:
        squares = (frame - self.means_GD) ** 2 / self.vars_GD + np.log(2 * np.pi * self.vars_GD)
        log_likelihoods = np.log(self.weights_G) - 0.5 * squares.sum(axis=1)
        likelihoods = np.exp(log_likelihoods - log_likelihoods.max())
        posteriors = likelihoods / likelihoods.sum()
        best = sorted(enumerate(posteriors), key=lambda pair: -pair[1])[:5]
        least = 0.025 * sum(value for _, value in best)
        kept = [best[0], *(pair for pair in best[1:] if pair[1] >= least)]
        total = sum(value for _, value in kept)
        return [(g, 0.1 * value / total) for g, value in kept]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of two rows, and a memory that earlier utterances fill."""
    monkeypatch.setattr(kaldi_extractor, "BLOCK", 2)
    monkeypatch.setattr(kaldi_extractor, "MAX_REMEMBERED", REMEMBERED)


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.usefixtures("small")
def test_online_ivectors_are_those_of_kaldi(tmp_path: Path, normalised: bool) -> None:
    model, rng = Model(), np.random.default_rng(1)
    folder = model.write(tmp_path / "extractor")
    if normalised:
        (folder / "online_cmvn_iextractor").touch()
    utterances = [rng.normal(0, 3, (length, CEPS)).astype(np.float32) for length in (1, 47, 21, 9)]
    found, expected = list(read_extractor(folder).online(utterances)), model.online(utterances, normalised)
    assert [len(rows) for rows in found] == [1, 5, 3, 1]
    for rows, expected_rows in zip(found, expected, strict=True):
        np.testing.assert_allclose(rows, expected_rows, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("exp") / "an4/features"
    data = write_corpus(root / "data", speakers=2)
    extract_features(data, root / "mfcc", "mfcc", SpectralOptions(RATE, 23, CEPS))
    return root


@pytest.mark.usefixtures("small")
def test_a_corpus_has_ivectors_of_the_extractor(features: Path, tmp_path: Path) -> None:
    model, out = Model(), features / "ivector"
    given = [f"align.extractor={model.write(tmp_path / 'extractor')}", "features.name=mfcc+ivector"]
    cfg = config(
        "corpus=an4", "align=kaldi", f"exp={features.parents[1]}", *given, "ivectors.online_utterances=2", "nj=1"
    )
    (target,) = speaker.targets(cfg)
    out.mkdir()
    target.build(out)
    for subset, restart in (("train", 2), ("test", 3)):
        reader = FeatureReader(features, "mfcc", subset)
        first = [name for name in reader.utterances if reader.speaker(name) == reader.speaker(reader.utterances[0])]
        raw = [reader.raw(name).astype(np.float64) for name in first]
        assert len(raw) == 3
        expected = [*model.online(raw[:restart]), *model.online(raw[restart:])]
        vectors = IvectorReader(out, subset, reader.speaker)
        for name, rows in zip(first, expected, strict=True):
            np.testing.assert_allclose(vectors[name], rows, rtol=1e-3, atol=1e-3)
    scratch = tmp_path / "recording"
    scratch.mkdir()
    names = write_recording("mfcc+ivector", {"mfcc": raw[0].astype(np.float32)}, [(0, len(raw[0]))], features, scratch)
    rows = IvectorReader(scratch / "ivector", "recording", lambda utterance: "recording")[names[0]]
    np.testing.assert_allclose(rows, model.online(raw[:1])[0], rtol=1e-3, atol=1e-3)


def test_damage_is_one_line(features: Path, tmp_path: Path) -> None:
    model = Model()
    sound = model.write(tmp_path / "sound")

    def refused(name: str, content: bytes | None, message: str) -> None:
        folder = shutil.copytree(sound, tmp_path / "damaged")
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content)
        with pytest.raises(InputError, match=message) as caught:
            kaldi_ivectors.extract_ivectors(folder, features, tmp_path, {"test": 0})
        assert "\n" not in str(caught.value)
        shutil.rmtree(folder)

    extractor = (sound / "final.ie").read_bytes()
    for name in kaldi_extractor.FILES:
        refused(name, None, f"{name}: cannot be read")
    refused("final.ie", extractor[: len(extractor) // 2], "ends too early|no ")
    refused("final.ie", extractor.replace(double_matrix([]), double_matrix([[1.0]])), "weights that depend")
    refused("final.ie", extractor.replace(token("DP") + integer(4), token("DP") + integer(-4), 1), "a negative size")
    refused("final.dubm", b"\0B" + token("<DiagGMM>"), "final.dubm: no ")
    refused("global_cmvn.stats", b" [ 1 2 x ]", "holds no matrix")
    refused("global_cmvn.stats", b" [\n1 2\n3 ]", "rows of different lengths")
    refused("splice_opts", b"--left-context=3", "do not fit each other")
    refused("splice_opts", b"3 3", "3 is not --name=value")
    refused("online_cmvn.conf", b"--cmn-window=0", "cmn-window=0 is not a number of frames")
    refused("online_cmvn.conf", b"--norm-vars", "only moving means are implemented")
    narrow = Model()
    narrow.matrix, narrow.everybody = narrow.matrix[:, : 4 * 3], narrow.everybody[-4:]
    with pytest.raises(
        InputError, match=r"13 MFCCs per frame, but Kaldi's extractor takes 3; set features\.kinds\.mfcc"
    ):
        kaldi_ivectors.extract_ivectors(narrow.write(tmp_path / "narrow"), features, tmp_path, {"test": 0})
