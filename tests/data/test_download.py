from __future__ import annotations

import re
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from asr_am.data.download import download, unpack
from asr_am.errors import InputError

CONTENTS = bytes(range(256)) * 5000


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/missing":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENTS)))
        self.end_headers()
        self.wfile.write(CONTENTS if self.path == "/whole" else CONTENTS[:1000])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_file_arrives_whole(tmp_path: Path, address: str) -> None:
    download(f"{address}/whole", tmp_path / "new" / "file", "get it", max_bytes=len(CONTENTS))
    assert (tmp_path / "new" / "file").read_bytes() == CONTENTS


@pytest.mark.parametrize("path", ["/missing", "/cut"])
def test_a_failed_download_leaves_nothing_and_says_what_to_do(tmp_path: Path, address: str, path: str) -> None:
    with pytest.raises(InputError, match="get it by hand"):
        download(address + path, tmp_path / "file", "get it by hand", max_bytes=len(CONTENTS))
    assert list(tmp_path.iterdir()) == []


def test_no_server_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="get it by hand"):
        download("http://127.0.0.1:9/file", tmp_path / "file", "get it by hand", max_bytes=len(CONTENTS))


def test_a_file_without_end_is_refused(tmp_path: Path, address: str) -> None:
    with pytest.raises(InputError, match="more than 1000 bytes; get it by hand"):
        download(f"{address}/whole", tmp_path / "file", "get it by hand", max_bytes=1000)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "kind", "link"),
    [
        ("../out", tarfile.REGTYPE, ""),
        ("inner", tarfile.SYMTYPE, "../out"),
        ("inner", tarfile.SYMTYPE, "/etc"),
        ("inner", tarfile.LNKTYPE, "../out"),
        ("device", tarfile.CHRTYPE, ""),
    ],
)
def test_members_outside_the_folder_are_refused_by_name(tmp_path: Path, name: str, kind: bytes, link: str) -> None:
    (tmp_path / "out").write_text("mine")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, link
        tar.addfile(member)
    with pytest.raises(InputError, match=re.escape(f"a.tar: its member {name} is refused")) as refused:
        unpack(tmp_path / "a.tar", tmp_path / "folder", "get another")
    assert "\n" not in str(refused.value) and (tmp_path / "out").read_text() == "mine"


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(b"\x1f\x8b no archive")
    with pytest.raises(InputError, match=r"a.tar.gz: cannot be unpacked .*; get another"):
        unpack(tmp_path / "a.tar.gz", tmp_path / "folder", "get another")
