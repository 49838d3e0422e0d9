"""A decoding run as Kaldi's files, a graph and i-vectors of Kaldi's as ours, and lhotse manifests both ways."""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path

import kaldi_native_io
import kaldifst
import kaldiio
import numpy as np
import pytest
from lhotse import CutSet, FeatureSet, RecordingSet, SupervisionSet, validate
from lhotse.dataset.collation import collate_features
from lhotse.dataset.speech_recognition import validate_for_asr
from lhotse.kaldi import load_kaldi_data_dir

from asr_am import kaldi_export, lhotse_export
from asr_am.data.manifests import read_recordings, read_supervisions
from asr_am.decode.decode_set import decode_sets
from asr_am.decode.graph import read_hclg
from asr_am.decode.kaldi_graph import import_graph
from asr_am.decode.kaldi_lattice import compact_lattice_bytes
from asr_am.decode.lattice import read_lattices
from asr_am.errors import InputError
from asr_am.features.ivector.ivector_archive import IvectorReader
from asr_am.features.ivector.kaldi_ivectors import import_ivectors
from asr_am.features.reader import FeatureReader
from asr_am.hmm.alignments import read_alignments, write_alignments
from asr_am.hmm.frames import FrameStore
from asr_am.hmm.fst_arrays import FstArrays
from asr_am.hmm.states import StateTable
from asr_am.lang.lang_dir import read_symbols, write_symbols
from asr_am.stages.align import kaldi_ivectors
from local.kaldi.prepare import prepare
from tests.support.decoding_corpus import OPTIONS, write_network, write_system
from tests.support.kaldi_corpus import LEXICON, RATE, write_kaldi_dir
from tests.support.kaldi_scp import load_scp
from tests.support.manifest_corpus import write_corpus


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns exp/<corpus> with a GMM system and the decoding run of a network."""
    root = tmp_path_factory.mktemp("exp") / "noise"
    system = write_system(root)
    model = write_network(root, StateTable.load(root / "align/states.npz").num_pdfs)
    (root / "decode/net_lm").mkdir(parents=True)
    decode_sets(
        type(system)(**vars(system) | {"model": model, "feature_kind": "logmel"}), root / "data",
        root / "decode/net_lm", OPTIONS,
    )  # fmt: skip
    return root


def test_a_decoding_run_is_written_for_kaldi(root: Path, tmp_path: Path) -> None:
    kaldi_export.export_decoding(root, "net_lm", tmp_path)
    run = tmp_path / "net_lm"
    lattices = dict(read_lattices(root / "decode/net_lm/lattices/test.ark"))
    content = gzip.decompress((run / "test/lat.1.gz").read_bytes())
    assert content == b"".join(name.encode() + b" " + compact_lattice_bytes(lattices[name]) for name in lattices)
    (tmp_path / "post.ark").write_bytes(gzip.decompress((run / "test/post.1.gz").read_bytes()))
    posteriors = dict(kaldi_native_io.SequentialPosteriorReader(f"ark:{tmp_path}/post.ark"))
    scores = load_scp(run / "test/loglikes.scp")
    states = StateTable.load(root / "align/states.npz")
    for name, lattice in lattices.items():
        assert len(posteriors[name]) == lattice.num_frames == len(scores[name])
        assert scores[name].shape[1] == states.num_pdfs
    priors_P = kaldiio.load_mat(str(run / "priors.vec"))
    counts_P = np.arange(1, states.num_pdfs + 1)
    np.testing.assert_allclose(priors_P, counts_P / counts_P.sum(), rtol=0.2)


def test_kaldis_graph_comes_back_as_it_was(root: Path, tmp_path: Path) -> None:
    kaldi_export.export_decoding(root, "net_lm", tmp_path)
    run, graph = tmp_path / "net_lm", tmp_path / "graph"
    graph.mkdir()
    import_graph(run / "graph", run / "final.mdl", root / "lang", graph)
    assert (graph / "HCLG.fst").read_bytes() == (root / "graph/HCLG.fst").read_bytes()
    assert (
        read_hclg(graph / "HCLG.fst").num_arcs
        == json.loads((graph / "graph.json").read_text())["sizes"]["HCLG"]["arcs"]
    )
    fst = kaldifst.StdVectorFst.read(str(run / "graph/HCLG.fst"))
    kaldifst.StdConstFst(fst).write(str(run / "graph/HCLG.fst"))  # what mkgraph.sh may write
    import_graph(run / "graph", run / "final.mdl", root / "lang", graph)
    assert (graph / "HCLG.fst").read_bytes() == (root / "graph/HCLG.fst").read_bytes()
    ids = FstArrays.from_fst(fst)
    ids.relabel(ids.ilabel_A + 1000 * (ids.ilabel_A > 0)).to_fst().write(str(run / "graph/HCLG.fst"))
    with pytest.raises(InputError, match=r"transition-ids that .* lacks"):
        import_graph(run / "graph", run / "final.mdl", root / "lang", graph)
    numbers = read_symbols(run / "graph/words.txt")
    first, second, *_ = (word for word in numbers if word[0] not in "<#")
    swapped = {**numbers, first: numbers[second], second: numbers[first]}
    for words in ({"<eps>": 0, "#0": 1, "OTHER": 2}, swapped):
        write_symbols(run / "graph/words.txt", words)
        with pytest.raises(InputError, match=r"other words than those of align\.lang"):
            import_graph(run / "graph", run / "final.mdl", root / "lang", graph)


def test_folders_of_ivectors_are_given_by_set() -> None:
    with pytest.raises(InputError, match=r'align\.ivectors=foo: must be "{train: DIR'):
        kaldi_ivectors({"ivectors": "foo"})


def test_online_ivectors_of_kaldi(root: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    folders, made = {}, {}
    for subset in ("train", "dev"):
        folder = folders[subset] = tmp_path / subset
        folder.mkdir()
        made[subset] = {name: rng.normal(size=(7, 4)).astype(np.float32)
                        for name in FeatureReader(root / "features", "mfcc", subset).utterances}  # fmt: skip
        kaldiio.save_ark(
            str(folder / "iv.ark"),
            made[subset],
            scp=str(folder / "ivector_online.scp"),
        )
        (folder / "ivector_period").write_text("10\n")
    out = tmp_path / "ivector"
    out.mkdir()
    import_ivectors(folders, root / "features", out)
    name = next(iter(made["dev"]))
    reader = IvectorReader(out, "dev", lambda utterance: "nobody")
    assert np.array_equal(reader[name], made["dev"][name])
    assert np.array_equal(reader.per_frame(name, 80)[[0, 9, 10, 79]], made["dev"][name][[0, 0, 1, 6]])
    (folders["dev"] / "ivector_period").write_text("1\n")
    with pytest.raises(InputError, match="give i-vectors of one extractor"):
        import_ivectors(folders, root / "features", out)
    (folders["dev"] / "ivector_period").write_text("10\n")
    wider = {name: np.zeros((7, 5), np.float32) for name in made["dev"]}
    kaldiio.save_ark(str(folders["dev"] / "iv.ark"), wider, scp=str(folders["dev"] / "ivector_online.scp"))
    with pytest.raises(InputError, match="5 dimensions, others have 4; give i-vectors of one extractor"):
        import_ivectors(folders, root / "features", out)
    lines = (folders["train"] / "ivector_online.scp").read_text().splitlines()
    (folders["train"] / "ivector_online.scp").write_text("\n".join(lines[1:]) + "\n")
    with pytest.raises(InputError, match="lacks 1 utterances of train"):
        import_ivectors(folders, root / "features", out)


def test_manifests_have_features_and_alignments(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = root / "align/mono"
    shutil.copytree(root / "align", tmp_path / "mono")
    (tmp_path / "mono").rename(folder)
    reader = FeatureReader(root / "features", "mfcc", "train")
    frames = FrameStore.write(tmp_path / "frames", reader.utterances, reader.__getitem__, "frames")
    labels = np.concatenate([np.sort(np.arange(n) % 3) + 1 for n in np.diff(frames.offsets_U1)])  # a phone of 3 states
    write_alignments(folder / "ali", "train", frames, labels)
    assert lhotse_export.main(["--exp", str(root), "--system", "mono", "--out", str(tmp_path / "out")]) == 0
    cuts = CutSet.from_file(tmp_path / "out/train/cuts_mfcc.jsonl.gz").to_eager()
    assert len(cuts) == len(reader.utterances)
    validate_for_asr(cuts)
    validate(FeatureSet.from_file(tmp_path / "out/train/features_mfcc.jsonl.gz"), read_data=True)
    features_BTF, frames_B = collate_features(cuts)
    assert features_BTF.shape[:2] == (len(cuts), max(frames_B)) and sum(frames_B) == reader.num_frames
    for cut in cuts:
        (segment,) = cut.supervisions
        np.testing.assert_array_equal(cut.load_features(), reader.raw(segment.id))
        (phone,) = segment.alignment["phone"]
        labels_T = dict(read_alignments(folder / "ali", "train"))[segment.id]
        assert phone.duration == pytest.approx(0.01 * len(labels_T))
    assert SupervisionSet.from_file(tmp_path / "out/dev/supervisions.jsonl.gz")[0].alignment is None
    assert lhotse_export.main(["--exp", str(root), "--system", "mono", "--out", str(tmp_path / "out")]) == 0, "again"
    assert lhotse_export.main(["--exp", str(root), "--system", "trii", "--out", str(tmp_path / "out")]) == 1
    assert "trii: no such GMM system; give one of mono" in capsys.readouterr().err
    own = tmp_path / "mine/train/recordings.jsonl.gz"
    own.parent.mkdir(parents=True)
    own.write_text("mine", encoding="utf-8")
    assert lhotse_export.main(["--exp", str(root), "--out", str(tmp_path / "mine")]) == 1
    assert "train: not made by asr_am.lhotse_export" in capsys.readouterr().err
    assert own.read_text(encoding="utf-8") == "mine" and not (tmp_path / "mine/dev").exists()
    assert lhotse_export.main(["--exp", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    (root / "data/.key").write_text("0123456789abcdef\n{}\n", encoding="utf-8")
    assert lhotse_export.main(["--exp", str(root), "--out", str(root / "data")]) == 1


def test_audio_of_commands_is_exported_without_running_them(tmp_path: Path) -> None:
    data = write_corpus(tmp_path / "exp/data")
    recordings = read_recordings(data, "train")
    for recording in recordings:
        recording.sources[0] = replace(recording.sources[0], type="command", source="exit 1")
    recordings.to_file(data / "train/recordings.jsonl.gz")
    assert lhotse_export.main(["--exp", str(tmp_path / "exp"), "--out", str(tmp_path / "out")]) == 0
    written = RecordingSet.from_file(tmp_path / "out/train/recordings.jsonl.gz")
    assert {recording.sources[0].source for recording in written} == {"exit 1"}


@pytest.mark.parametrize("form", ["folder", "cuts"])
def test_manifests_are_training_data(tmp_path: Path, form: str) -> None:
    train = write_kaldi_dir(tmp_path / "train", "a", speakers=10)
    test = write_kaldi_dir(tmp_path / "test", "b", kind="flac")
    (tmp_path / "lexicon.txt").write_text(LEXICON)
    given = {"lexicon": str(tmp_path / "lexicon.txt"), "sampling_rate": RATE}
    prepare(tmp_path / "expected", train=str(train), test=str(test), **given)
    recordings, supervisions, _ = load_kaldi_data_dir(train, RATE)
    if form == "cuts":
        source = tmp_path / "cuts.jsonl.gz"
        assert supervisions is not None
        CutSet.from_manifests(recordings, supervisions).to_file(source)
    else:
        source = tmp_path / "manifests"
        source.mkdir()
        RecordingSet.from_recordings(recordings).to_file(source / "recordings.jsonl.gz")
        SupervisionSet.from_segments(supervisions or ()).to_file(source / "supervisions.jsonl.gz")
    prepare(tmp_path / "data", train=str(source), test=str(test), **given)
    for subset in ("train", "dev"):
        found, expected = (
            {s.id: (s.text, s.speaker, round(s.duration, 3)) for s in read_supervisions(tmp_path / name, subset)}
            for name in ("data", "expected")
        )
        assert found == expected and found
    (tmp_path / "bad.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match=r"bad\.jsonl: not a readable lhotse manifest"):
        prepare(tmp_path / "other", train=str(tmp_path / "bad.jsonl"), test=str(test), **given)


def test_a_recording_without_a_transcript_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "speech"
    folder.mkdir()
    (folder / "a.wav").write_bytes(b"")
    with pytest.raises(InputError, match=r"a\.wav: has no transcript; write a\.txt beside it"):
        prepare(tmp_path / "data", train=None, test=None, lexicon=None, folder=str(folder), sampling_rate=RATE)
    (folder / "a.wav").rename(folder / "b.bak")
    (folder / "c.txt").write_text("words\n")
    with pytest.raises(InputError, match=r"speech: has no recordings"):
        prepare(tmp_path / "data", train=None, test=None, lexicon=None, folder=str(folder), sampling_rate=RATE)
