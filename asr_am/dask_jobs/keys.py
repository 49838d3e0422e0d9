"""The TLS key of a Dask cluster: `python -m asr_am.dask_jobs.keys FOLDER`.

Scheduler, workers and stages have the same key, and a certificate that only this key can have signed. So whoever can
read the key may run jobs, and nobody else.
"""

from __future__ import annotations

import argparse
import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from asr_am import disk
from asr_am.errors import InputError

if TYPE_CHECKING:
    from distributed.security import Security

KEYS_COMMAND = "python -m asr_am.dask_jobs.keys FOLDER"
CERTIFICATE, KEY = "cert.pem", "key.pem"


def make_keys(folder: Path) -> None:
    """Writes a new key and its certificate, valid for a year. Only the owner can read them.

    Raises:
        InputError: the folder has a key, which may be in use, or cannot be written to.
    """
    from distributed.security import Security

    new = Security.temporary()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, content in ((KEY, new.tls_client_key), (CERTIFICATE, new.tls_client_cert)):
            disk.write_private(folder / name, content)
    except OSError as error:
        raise InputError(f"{error.filename}: cannot be created ({error.strerror}): name a new folder") from error


def check_keys(folder: Path) -> None:
    """Raises InputError if others can read the key, or there is none."""
    cert, key = (str((folder / name).absolute()) for name in (CERTIFICATE, KEY))
    try:
        mode = stat.S_IMODE(os.stat(key).st_mode)
        os.stat(cert)
    except OSError as error:
        raise InputError(f"{error.filename}: cannot be read ({error.strerror}): make it with {KEYS_COMMAND}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InputError(
            f"{key}: other users have access to it (mode {mode:03o}): chmod 600 {key}, or, if anyone may have read it, "
            f"make a new one with {KEYS_COMMAND}"
        )


def read_keys(folder: Path) -> Security:
    """Returns the TLS settings of all ends. Raises InputError as `check_keys`."""
    from distributed.security import Security

    check_keys(folder)
    cert, key = (str((folder / name).absolute()) for name in (CERTIFICATE, KEY))
    ends = {f"tls_{end}_{kind}": path for end in ("client", "scheduler", "worker")
            for kind, path in (("cert", cert), ("key", key))}  # fmt: skip
    return Security(require_encryption=True, tls_ca_file=cert, **ends)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=KEYS_COMMAND.removesuffix(" FOLDER"), description="Make the TLS key of a Dask cluster."
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a new folder, which every host needs")
    folder = parser.parse_args().folder
    try:
        make_keys(folder)
    except ImportError:
        sys.exit("needs the package distributed; pip install -e '.[cluster]'")
    except InputError as error:
        sys.exit(str(error))
    tls = f"--tls-ca-file {folder / CERTIFICATE} --tls-cert {folder / CERTIFICATE} --tls-key {folder / KEY}"
    print(f"dask scheduler --protocol tls --port 8786 {tls}")
    print(f"dask worker --nthreads 1 --memory-limit 0 {tls} tls://HOST:8786    # on each host, once per job")
    print(f"... jobs=dask jobs.scheduler=tls://HOST:8786 jobs.keys={folder}")


if __name__ == "__main__":
    main()
