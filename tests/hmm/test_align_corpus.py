"""Stage align on synthetic speech: it finds the true states, and resumes after being killed."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from asr_am.errors import InputError
from asr_am.hmm import align_corpus as module
from asr_am.hmm.align_corpus import LdaOptions, MonoOptions, SatOptions, TriOptions, align_corpus
from asr_am.hmm.frames import FrameStore
from asr_am.hmm.gmm_system import GmmSystem
from asr_am.hmm.states import StateTable
from asr_am.hmm.train_mono import CANDIDATES, shortest
from asr_am.hmm.training import require_aligned
from asr_am.options import build
from tests.support.gmm_training import MONO, TRI, phones_in, write_corpus
from tests.support.synthetic_speech import Spoken, training_context


def run(root: Path, out: Path, mono: MonoOptions = MONO, tri: TriOptions = TRI) -> None:
    align_corpus(root / "data", root / "lang", root / "features", out, mono=mono, tri=tri)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Spoken]]:
    root = tmp_path_factory.mktemp("corpus")
    _, sets = write_corpus(root)
    run(root, root / "align")
    return root, sets


def test_systems_find_the_true_states(trained: tuple[Path, dict[str, Spoken]]) -> None:
    root, sets = trained
    assert sorted(path.name for path in (root / "align").iterdir()) == ["mono", "tri"]
    for system in ("mono", "tri"):
        loaded = GmmSystem.load(root / "align" / system)
        assert loaded.tree.width == (3 if system == "tri" else 1)
        for subset, spoken in sets.items():
            found = phones_in(root / "align" / system, subset)
            assert sorted(found) == sorted(spoken.labels)
            truth = {name: spoken.states.labels_L3[labels_T - 1, :2] for name, labels_T in spoken.labels.items()}
            right_N2 = np.concatenate([found[name] == truth[name] for name in truth])
            assert right_N2[:, 0].mean() > 0.9, "phones"
            assert right_N2.all(axis=1).mean() > 0.8, "states"


def test_monophone_training_on_the_shortest_utterances(trained: tuple[Path, dict[str, Spoken]]) -> None:
    root, sets = trained
    lengths = sorted(map(len, sets["train"].labels.values()))
    run(root, root / "short", replace(MONO, frames=sum(lengths[:19]) + 1))
    states = sets["train"].states
    for subset, spoken in sets.items():
        found = phones_in(root / "short/mono", subset)
        right_N = np.concatenate([found[n] == states.labels_L3[t - 1, :2] for n, t in spoken.labels.items()])
        assert right_N[:, 0].mean() > 0.9, subset
    gmms = [GmmSystem.load(root / name / "mono").gmms.means_GD for name in ("align", "short")]
    assert not np.array_equal(*gmms)


def test_selecting_short_utterances(tmp_path: Path) -> None:
    ctx, _ = training_context(tmp_path)
    length_U = np.diff(ctx.train.offsets_U1)
    names = np.array(ctx.train.utterances)
    order = np.argsort(length_U, kind="stable")
    cumulated = np.cumsum(length_U[order])
    candidates = int(np.searchsorted(cumulated, CANDIDATES * length_U.sum())) + 1
    assert 7 < candidates < len(names) - 1
    for count in (1, 7, candidates, len(names) - 1):
        frames = int(cumulated[count - 1])
        part = shortest(ctx, frames)
        chosen = set(part.train.utterances)
        assert part.train.num_frames >= frames and part.sets["dev"] is ctx.sets["dev"]
        if count < candidates:  # drawn from more, so not the very shortest
            assert chosen < set(names[order[:candidates]]) and chosen != set(names[order[:count]])
        else:
            assert chosen == set(names[order[:count]])
        index = ctx.train.utterances.index(part.train.utterances[0])
        assert np.array_equal(part.train.x_ND[part.train.span(0)], ctx.train.x_ND[ctx.train.span(index)])
        assert part.sets["train"].words_U[0] == ctx.sets["train"].words_U[index]
    assert shortest(ctx, 0) is ctx and shortest(ctx, int(length_U.sum())) is ctx
    for unusable in (-1, None, "many"):
        with pytest.raises(InputError, match=rf"mono\.frames is {unusable!r}"):
            replace(MONO, frames=unusable)


def test_a_killed_run_resumes_to_the_same_result(
    trained: tuple[Path, dict[str, Spoken]], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, _ = trained
    out = root / "again"

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("asr_am.hmm.training.write_alignments", killed)
        run(root, out)
    assert not GmmSystem.is_complete(out / "mono")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "train_tri", killed)
        run(root, out)
    written = (out / "mono" / "gmm.npz").stat().st_mtime_ns
    with monkeypatch.context() as patch:
        patch.setattr(module, "train_mono", killed)
        run(root, out)
    assert (out / "mono" / "gmm.npz").stat().st_mtime_ns == written
    for name in ("mono/gmm.npz", "tri/gmm.npz", "tri/states.npz", "tri/tree.json", "tri/ali/train.ark"):
        assert (out / name).read_bytes() == (root / "align" / name).read_bytes(), name


def test_features_without_a_transcript_are_rejected(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    path = tmp_path / "data" / "dev" / "supervisions.jsonl.gz"
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    path.write_bytes(gzip.compress("\n".join(lines[1:]).encode()))
    with pytest.raises(InputError, match="spk0-000 has features but no transcript"):
        run(tmp_path, tmp_path / "align")


def test_invalid_options_are_rejected() -> None:
    with pytest.raises(InputError, match="iterations"):
        MonoOptions(iterations=0)
    with pytest.raises(InputError, match="phone_states"):
        MonoOptions(phone_states=0)
    with pytest.raises(InputError, match="beam"):
        TriOptions(beam=-1.0)
    lists = ((TriOptions, {"realign": 10}), (LdaOptions, {"mllt": (2.5,)}), (SatOptions, {"fmllr_passes": "2"}))
    for kind, wrong in lists:
        with pytest.raises(InputError, match=rf"^align\.x\.{next(iter(wrong))}"):
            build(kind, wrong, "align.x")


def test_inconsistent_systems_are_rejected(trained: tuple[Path, dict[str, Spoken]], tmp_path: Path) -> None:
    root, _ = trained
    for name in ("tree.json", "states.npz", "gmm.npz"):
        source = root / "align" / ("mono" if name == "gmm.npz" else "tri") / name
        (tmp_path / name).write_bytes(source.read_bytes())
    with pytest.raises(InputError, match="different numbers of pdfs"):
        GmmSystem.load(tmp_path)


def test_damaged_states_and_frames_are_input_errors(trained: tuple[Path, dict[str, Spoken]], tmp_path: Path) -> None:
    root, _ = trained
    content = (root / "align" / "tri" / "states.npz").read_bytes()
    for cut in range(0, len(content), len(content) // 40):
        (tmp_path / "states.npz").write_bytes(content[:cut])
        with pytest.raises(InputError, match=r"states\.npz"):
            StateTable.load(tmp_path / "states.npz")
    store = FrameStore.write(tmp_path / "frames", ["a"], lambda _: np.zeros((9, 2), np.float32), "frames")
    assert store.num_frames == 9
    data = (tmp_path / "frames" / "frames.f32").read_bytes()
    (tmp_path / "frames" / "frames.f32").write_bytes(data[:-1])
    with pytest.raises(InputError, match=r"frames\.f32"):
        FrameStore(tmp_path / "frames")
    with pytest.raises(InputError, match="not finite"):
        FrameStore.write(tmp_path / "frames", ["a"], lambda _: np.full((9, 2), np.nan, np.float32), "frames")


def test_training_stops_if_most_utterances_have_no_alignment() -> None:
    names = [f"utterance-{number}" for number in range(60)]
    require_aligned("tri", names[:50], 100)
    with pytest.raises(
        InputError, match=r"tri: 60 of 100 training utterances .*, the first utterance-0;.* align.tri.retry_beam"
    ):
        require_aligned("tri", names, 100)
