"""LDA+MLLT and SAT on speakers with linearly distorted features."""

from __future__ import annotations

from pathlib import Path

import kaldiio
import numpy as np
import pytest

from asr_am.errors import InputError
from asr_am.hmm import align_corpus as module
from asr_am.hmm.gmm_system import PROJECTION, TRANSFORMS, UNADAPTED, GmmSystem
from tests.support.gmm_training import phones_in, run, train_systems
from tests.support.kaldi_scp import load_scp
from tests.support.synthetic_speech import Spoken


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Spoken]]:
    return train_systems(tmp_path_factory.mktemp("corpus"))


def accuracy(folder: Path, subset: str, spoken: Spoken) -> float:
    found = phones_in(folder, subset)
    truth = {name: spoken.states.labels_L3[labels_T - 1, :2] for name, labels_T in spoken.labels.items()}
    return float(np.concatenate([(found[name] == truth[name]).all(axis=1) for name in truth]).mean())


def test_every_system_finds_the_true_states(trained: tuple[Path, dict[str, Spoken]]) -> None:
    root, sets = trained
    for system, kind in (("mono", "mfcc"), ("tri", "mfcc"), ("lda_mllt", "lda"), ("sat", "fmllr")):
        assert GmmSystem.kind(root / "align" / system) == kind
        for subset, spoken in sets.items():
            assert accuracy(root / "align" / system, subset, spoken) > 0.75, (system, subset)
    assert sorted(path.name for path in (root / "align").iterdir()) == ["lda_mllt", "mono", "sat", "tri"]


def test_adaptation_reduces_the_distance_between_speakers(trained: tuple[Path, dict[str, Spoken]]) -> None:
    """The projection and a speaker's transform together undo the speaker's distortion, so products are similar."""
    root, _ = trained
    folder = root / "align" / "sat"
    matrix = kaldiio.load_mat(str(folder / PROJECTION))[:, 13:26]  # the columns of the centre frame
    transforms = load_scp(folder / TRANSFORMS / "train_trans.scp")
    assert sorted(transforms) == ["spk0", "spk1"]
    plain, adapted = [], []
    for speaker in ("spk0", "spk1"):
        distortion = np.eye(13) + 0.15 * np.random.default_rng(int(speaker[3])).normal(size=(13, 13))
        plain.append(matrix @ distortion.T)
        adapted.append(transforms[speaker][:, :-1] @ matrix @ distortion.T)

    def distance(pair: list[np.ndarray]) -> float:
        return float(np.linalg.norm(pair[0] - pair[1]) / np.linalg.norm(pair[0] + pair[1]))

    assert distance(adapted) < 0.7 * distance(plain)


def test_unadapted_mixtures_have_the_same_number_of_gaussians(
    trained: tuple[Path, dict[str, Spoken]],
) -> None:
    from asr_am.hmm.gmm import DiagGmms

    folder = trained[0] / "align" / "sat"
    plain, adapted = DiagGmms.load(folder / UNADAPTED), DiagGmms.load(folder / "gmm.npz")
    assert plain.offsets_P1.tolist() == adapted.offsets_P1.tolist()
    assert not np.allclose(plain.means_GD, adapted.means_GD, atol=0.1)


def test_a_killed_run_resumes_to_the_same_result(
    trained: tuple[Path, dict[str, Spoken]], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, _ = trained
    out = root / "again"

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "train_sat", killed)
        run(root, out)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("asr_am.hmm.train_sat.unadapted_gmms", killed)
        run(root, out)
    assert GmmSystem.is_complete(out / "lda_mllt") and not GmmSystem.is_complete(out / "sat")
    with monkeypatch.context() as patch:
        patch.setattr(module, "train_lda_mllt", killed)
        run(root, out)
    names = "gmm.npz", UNADAPTED, PROJECTION, f"{TRANSFORMS}/train_trans.ark", "ali/train.ark", "ali/dev.ark"
    for name in names:
        assert (out / "sat" / name).read_bytes() == (root / "align" / "sat" / name).read_bytes(), name


def test_sat_needs_lda_mllt(trained: tuple[Path, dict[str, Spoken]], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="lda_mllt"):
        run(trained[0], tmp_path / "align", lda_mllt=None)
