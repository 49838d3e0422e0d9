"""A GMM system as Kaldi's files: read back with kaldiio, kaldifst and our readers of Kaldi's formats."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import kaldifst
import kaldiio
import numpy as np
import pytest

from asr_am import kaldi_export
from asr_am.features.adapted import Projection, splice, write_transforms
from asr_am.hmm.alignments import write_alignments
from asr_am.hmm.gmm_system import PROJECTION, TRANSFORMS, UNADAPTED, GmmSystem
from asr_am.hmm.kaldi_model import read_model
from asr_am.hmm.kaldi_tree import read_tree
from tests.support.synthetic_speech import Spoken, all_labels, make_lang, speak, store, write_features


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, Spoken]:
    """Returns exp/<corpus> with the system sat, whose alignments of train are the true ones."""
    root = tmp_path / "exp"
    lang = make_lang(root)
    spoken = speak(lang, 12)
    folder = root / "align/sat"
    GmmSystem(spoken.tree, spoken.states, spoken.gmms).save(folder)
    spoken.gmms.save(folder / UNADAPTED)
    frames = store(tmp_path / "frames", spoken.frames)
    write_alignments(folder / "ali", "train", frames, all_labels(frames, spoken))
    rng = np.random.default_rng(0)
    Projection(rng.normal(size=(5, 7 * 13)).astype(np.float32), 13).save(folder / PROJECTION)
    (folder / TRANSFORMS).mkdir()
    write_transforms(folder / TRANSFORMS, "train", {name: rng.normal(size=(5, 6)) for name in ("spk0", "spk1")})
    write_features(root / "features", spoken, "train")
    return root, spoken


def test_kaldis_files_say_the_same(trained: tuple[Path, Spoken], tmp_path: Path) -> None:
    root, spoken = trained
    assert kaldi_export.main(["--exp", str(root), "--out", str(tmp_path / "kaldi")]) == 0
    folder = tmp_path / "kaldi/sat_train"
    transitions, gmms = read_model(folder / "final.mdl")
    tree = read_tree(folder / "tree", transitions.states_P)
    assert np.array_equal(transitions.triples_L3, spoken.states.labels_L3)
    assert tree.num_pdfs == gmms.num_pdfs == spoken.gmms.num_pdfs
    with gzip.open(folder / "ali.1.gz") as file:
        found = dict(kaldiio.load_ark(io.BytesIO(file.read())))
    assert found.keys() == spoken.labels.keys()
    for name, labels_T in spoken.labels.items():
        assert np.array_equal(transitions.labels(found[name]), labels_T)
        visits = 1 + np.count_nonzero(np.diff(labels_T))
        assert np.count_nonzero(~transitions.loop_K[found[name] - 1]) == visits  # one exit a visit, as in Kaldi
    x_TS = np.random.default_rng(1).normal(size=(9, 13)).astype(np.float32)
    matrix = kaldiio.load_mat(str(folder / "final.mat"))
    expected = Projection.load(root / "align/sat" / PROJECTION, 13)(x_TS)
    np.testing.assert_allclose(splice(x_TS, 3) @ matrix.T, expected, atol=1e-4)
    assert (folder / "splice_opts").read_text() == "--left-context=3 --right-context=3\n"
    transforms = dict(kaldiio.load_ark(str(folder / "trans.1")))
    own = dict(kaldiio.load_ark(str(root / "align/sat" / TRANSFORMS / "train_trans.ark")))
    assert transforms.keys() == own.keys() and all(np.array_equal(transforms[name], own[name]) for name in own)


def test_files_of_the_user_stay(
    trained: tuple[Path, Spoken], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--exp", str(trained[0]), "--out", str(tmp_path / "data")]
    own = tmp_path / "data/sat_train/final.mdl"
    own.parent.mkdir(parents=True)
    own.write_text("mine", encoding="utf-8")
    assert kaldi_export.main(arguments) == 1
    assert "sat_train: not made by asr_am.kaldi_export" in capsys.readouterr().err
    assert own.read_text(encoding="utf-8") == "mine" and not (tmp_path / "data/lang").exists()
    own.unlink()
    assert kaldi_export.main(arguments) == 0
    assert kaldi_export.main(arguments) == 0, "its own folders are written again"


def test_outputs_of_stages_stay(
    trained: tuple[Path, Spoken], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other/lang"
    for output in (other, trained[0] / "align/sat"):
        output.mkdir(parents=True, exist_ok=True)
        (output / ".key").write_text("0123456789abcdef\n{}\n", encoding="utf-8")
    for out in (other.parent, other / "kaldi", trained[0] / "align/sat"):
        assert kaldi_export.main(["--exp", str(trained[0]), "--out", str(out)]) == 1
        assert "is the output of a stage, and nothing else is written there" in capsys.readouterr().err
    assert [path.name for path in other.iterdir()] == [".key"] and not (trained[0] / "align/sat/lang").exists()


def test_the_lang_directory(trained: tuple[Path, Spoken], tmp_path: Path) -> None:
    root, _ = trained
    kaldi_export.export(root, "sat", tmp_path)
    lang = tmp_path / "lang"
    fst = kaldifst.StdVectorFst.read(str(lang / "L.fst"))
    assert fst.num_states > 3 and (lang / "phones/silence.csl").read_text() == "1:2:3\n"
    assert (lang / "phones/optional_silence.txt").read_text() == "SIL\n" and (lang / "oov.txt").read_text() == "<unk>\n"
    assert "AB AB aa_B bb_E" in (lang / "phones/align_lexicon.txt").read_text().splitlines()
    assert "shared split aa_B aa_E aa_I aa_S" in (lang / "phones/roots.txt").read_text()


def test_an_unknown_system_is_one_line(
    trained: tuple[Path, Spoken], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for system in ("tri", "../align/sat"):
        assert kaldi_export.main(["--exp", str(trained[0]), "--system", system, "--out", str(tmp_path / "kaldi")]) == 1
        assert f"{system}: no such GMM system; give one of" in capsys.readouterr().err
    assert kaldi_export.main(["--exp", str(tmp_path), "--out", str(tmp_path / "kaldi")]) == 1
    assert "has no GMM system; run stage 3" in capsys.readouterr().err and not (tmp_path / "kaldi").exists()
