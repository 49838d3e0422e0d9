"""Kaldi archives are data: nothing that stands in one, or in its name, is run."""

import pickle
import shutil
from pathlib import Path

import kaldiio
import numpy as np
import pytest

from asr_am.data.kaldi_archive import Entry, read_archive, read_entry, read_scp, write_archive
from asr_am.errors import InputError
from asr_am.features.feature_archive import load_matrix


class Mischief:
    """Makes a file when it is unpickled."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple:
        return Path.touch, (self.made,)


def test_entries_and_archives_are_read_back(tmp_path):
    matrices = {"a": np.eye(3, dtype=np.float32), "b": np.ones((2, 5), dtype=np.float32)}
    kaldiio.save_ark(str(tmp_path / "x.ark"), matrices, scp=str(tmp_path / "x.scp"))
    for key, matrix in read_archive(tmp_path / "x.ark"):
        assert np.array_equal(matrix, matrices.pop(key))
    assert not matrices
    assert np.array_equal(read_entry(read_scp(tmp_path / "x.scp", "")["a"]), np.eye(3))


def test_a_pickle_is_refused_and_not_run(tmp_path):
    ark, made = tmp_path / "x.ark", tmp_path / "made"
    ark.write_bytes(b"a PKL" + pickle.dumps(Mischief(made)))
    with pytest.raises(ValueError, match="pickle"):
        list(read_archive(ark))
    with pytest.raises(InputError, match="pickle"):
        load_matrix(Entry(str(ark), 2), "make it again")
    assert not made.exists()
    kaldiio.load_mat(f"{ark}:2")
    assert made.exists(), "the archive would have run something"


def test_a_name_that_is_a_command_is_not_run(tmp_path):
    made = tmp_path / "made"
    with pytest.raises(InputError):
        load_matrix(Entry(f"touch {made} |", 0), "make it again")
    assert not made.exists()


def test_a_copied_index_names_the_archive_beside_it(tmp_path):
    """Also an index with absolute paths. Kaldi's own may name an archive elsewhere."""
    original, copy = tmp_path / "original", tmp_path / "copy"
    original.mkdir()
    write_archive(original, "x", [("b", np.zeros((2, 3), dtype=np.float32)), ("a", np.eye(3, dtype=np.float32))])
    assert (original / "x.scp").read_text() == "b x.ark:2\na x.ark:43\n"
    kaldiio.save_ark(str(original / "old.ark"), {"a": np.eye(2)}, scp=str(original / "old.scp"))
    shutil.copytree(original, copy)
    (copy / "x.ark").write_bytes((original / "x.ark").read_bytes().replace(np.float32(1).tobytes(), b"\0\0\0@"))
    with pytest.raises(ValueError, match="checksum is wrong"):
        read_entry(read_scp(copy / "x.scp", "")["a"])
    (copy / "x.crc32").unlink()
    assert np.array_equal(read_entry(read_scp(copy / "x.scp", "")["a"]), 2 * np.eye(3))
    assert read_scp(copy / "old.scp", "")["a"].path == f"{copy}/old.ark"
    (copy / "old.ark").unlink()
    assert read_scp(copy / "old.scp", "")["a"].path == f"{original}/old.ark"


def test_a_malformed_index_names_the_line(tmp_path):
    for content, message in (("a x.ark:2\nb x.ark\n", "index.scp:2: 'b x.ark' is not"), ("", "index.scp: empty")):
        (tmp_path / "index.scp").write_text(content)
        with pytest.raises(InputError, match=message):
            read_scp(tmp_path / "index.scp", "make it again")
