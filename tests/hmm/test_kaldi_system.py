"""A Kaldi system in place of stages 1 and 3: what kaldi_export wrote is imported as it was, or refused in one line."""

from __future__ import annotations

import gzip
import io
import shutil
from pathlib import Path

import kaldiio
import numpy as np
import pytest

from asr_am import kaldi_export
from asr_am.errors import InputError
from asr_am.hmm.alignments import read_alignments, write_alignments
from asr_am.hmm.gmm_system import GmmSystem
from asr_am.hmm.kaldi_system import import_system
from asr_am.lang.kaldi_lang import import_lang
from asr_am.lang.lang_dir import Lang
from asr_am.stages.align import check_options, targets
from tests.support.configurations import config
from tests.support.synthetic_speech import Spoken, all_labels, make_lang, speak, store, write_features

SETS = {"train": (10, 0), "dev": (4, 1)}  # utterances, seed


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Spoken]]:
    """Returns a folder with exp/, and kaldi/ with the system tri of exp/ as Kaldi's directories."""
    folder = tmp_path_factory.mktemp("kaldi")
    root = folder / "exp"
    lang, spoken = make_lang(root), {}
    for subset, (utterances, seed) in SETS.items():
        spoken[subset] = speak(lang, utterances, seed, dim=13)
        frames = store(folder / "frames" / subset, spoken[subset].frames)
        write_alignments(root / "align/tri/ali", subset, frames, all_labels(frames, spoken[subset]))
        write_features(root / "features", spoken[subset], subset)
    GmmSystem(spoken["train"].tree, spoken["train"].states, spoken["train"].gmms).save(root / "align/tri")
    kaldi_export.export(root, "tri", folder / "kaldi")
    return folder, spoken


@pytest.fixture
def copy(exported: tuple[Path, dict[str, Spoken]], tmp_path: Path) -> Path:
    shutil.copytree(exported[0], tmp_path / "copy")
    return tmp_path / "copy"


def bring_in(folder: Path, out: Path) -> None:
    (out / "lang").mkdir(parents=True)
    import_lang(folder / "kaldi/lang", out / "lang")
    folders = {subset: folder / f"kaldi/tri_{subset}" for subset in SETS}
    import_system(folders, out / "lang", folder / "exp/features", out / "system")


def test_the_same_system_comes_back(exported: tuple[Path, dict[str, Spoken]], tmp_path: Path) -> None:
    folder, spoken = exported
    bring_in(folder, tmp_path)
    before, after = Lang.load(folder / "exp/lang"), Lang.load(tmp_path / "lang")
    assert (after.phones, after.words, after.pronunciations) == (before.phones, before.words, before.pronunciations)
    assert (after.silence_phones, after.unk, after.position_dependent) == (before.silence_phones, before.unk, True)
    system = GmmSystem.load(tmp_path / "system")
    states = spoken["train"].states
    assert np.array_equal(system.states.labels_L3, states.labels_L3)
    np.testing.assert_allclose(system.gmms.means_GD, spoken["train"].gmms.means_GD, atol=1e-4)
    for subset in SETS:
        found = dict(read_alignments(tmp_path / "system/ali", subset))
        assert found.keys() == spoken[subset].labels.keys()
        assert all(np.array_equal(found[name], labels_T) for name, labels_T in spoken[subset].labels.items())


def test_the_word_for_unknown_words_is_renamed(copy: Path, tmp_path: Path) -> None:
    for name in ("words.txt", "oov.txt", "phones/align_lexicon.txt"):
        path = copy / "kaldi/lang" / name
        path.write_text(path.read_text().replace("<unk>", "<UNK>"))
    lexicon = copy / "kaldi/lang/phones/align_lexicon.txt"
    lexicon.write_text(f"<eps> <eps> SIL\n{lexicon.read_text()}")  # as Kaldi has it
    (tmp_path / "lang").mkdir()
    import_lang(copy / "kaldi/lang", tmp_path / "lang")
    assert Lang.load(tmp_path / "lang").words == Lang.load(copy / "exp/lang").words


def test_what_does_not_belong_together_is_one_line(copy: Path, tmp_path: Path) -> None:
    def refused(message: str) -> None:
        with pytest.raises(InputError, match=message) as caught:
            bring_in(copy, tmp_path / "out")
        shutil.rmtree(tmp_path / "out")
        assert "\n" not in str(caught.value)

    train, lang = copy / "kaldi/tri_train", copy / "kaldi/lang"
    words = (lang / "words.txt").read_text()
    (lang / "words.txt").write_text(words.replace(" ", "_"))
    refused(r"words\.txt:1: not a symbol and its number, .*; give the directory that utils/prepare_lang\.sh wrote")
    (lang / "words.txt").write_text(words)
    archive = (train / "ali.1.gz").read_bytes()
    entries = dict(kaldiio.load_ark(io.BytesIO(gzip.decompress(archive))))

    def write(changed: dict[str, np.ndarray]) -> None:
        buffer = io.BytesIO()
        kaldiio.save_ark(buffer, changed)
        (train / "ali.1.gz").write_bytes(gzip.compress(buffer.getvalue()))

    first = min(entries)
    write(entries | {first: entries[first][:-1]})
    refused(f"{first} has {len(entries[first]) - 1} frames, its features here {len(entries[first])}")
    write(entries | {first: entries[first] + 9999})
    refused("damaged, or of another system .*transition-ids outside")
    write(dict(list(entries.items())[:4]))
    refused("alignments of only 4 of 10 utterances of train")
    (train / "ali.1.gz").write_bytes(archive[:-50])
    refused(r"ali.1.gz: damaged")
    (train / "ali.1.gz").unlink()
    refused(r"holds no ali")
    (train / "phones.txt").write_text("<eps> 0\nSIL 2\n#0 1\n")
    refused("other phones than those of align.lang")
    (lang / "L.fst").unlink()
    refused("L.fst: no such file")
    (lang / "oov.txt").write_text("WHAT\n")
    refused("WHAT is not the only unknown word")


def test_the_directories_are_options(copy: Path) -> None:
    given = [f"align.dir={copy}/kaldi/tri_train", f"align.dev_dir={copy}/kaldi/tri_dev"]
    with pytest.raises(InputError, match=r"align.lang=None: no such directory; see conf/align/kaldi.yaml"):
        targets(config("corpus=an4", "align=kaldi", "features=logmel", *given))
    (target,) = targets(config("corpus=an4", "align=kaldi", f"align.lang={copy}/kaldi/lang", *given, f"exp={copy}"))
    assert [path.name for path in target.inputs] == ["lang", "mfcc", "tri_train", "tri_dev"]
    given += ["corpus=an4", "align=kaldi", f"align.lang={copy}/kaldi/lang", f"align.extractor={copy}"]
    with pytest.raises(InputError, match=r"align.extractor=.*: has no final.ie"):
        check_options(config(*given))
    (copy / "ivector_online.scp").touch()
    with pytest.raises(InputError, match=r"align.extractor and align.ivectors: give one of them"):
        check_options(config(*given, f"align.ivectors={{train: {copy}}}"))
