#!/usr/bin/env bash
# Writes scripts/requirements.lock: every package that scripts/setup.sh installs beside torch, with its version and the
# SHA-256 of its files for Linux x86-64 and each Python of PYTHONS. Run it after a change to the dependencies in
# pyproject.toml. Needs a finished .venv and PyPI itself: the files of another index may differ.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHONS=(3.11 3.12 3.13)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip() {
    PIP_CONFIG_FILE=/dev/null env -u PIP_FIND_LINKS -u PIP_INDEX_URL -u PIP_EXTRA_INDEX_URL \
        .venv/bin/python -m pip --quiet --disable-pip-version-check "$@"
}
pip install --dry-run --ignore-installed --report "$work/report.json" '.[minicts,dev]'
.venv/bin/python - "$work" <<'END'
import json
import re
import sys
from pathlib import Path

LOCAL = ("torch", "asr-am")  # torch comes from another index, see setup.sh. Ours is not downloaded.
OF_TORCH = ("nvidia-", "triton", "cuda-")  # of its GPU builds, which pip installs with torch
SOURCE = ("antlr4-python3-runtime",)  # has no wheel
LATER = ("audioop-lts==0.2.2", "standard-aifc==3.13.0", "standard-chunk==3.13.0", "standard-sunau==3.13.0")  # from 3.13 on
work = Path(sys.argv[1])
lines, source = [], []
for item in json.loads((work / "report.json").read_text())["install"]:
    name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
    if name not in (*LOCAL, *(line.partition("==")[0] for line in LATER)) and not name.startswith(OF_TORCH):
        (source if name in SOURCE else lines).append(f"{name}=={item['metadata']['version']}\n")
(work / "pins").write_text("".join(lines))
(work / "source").write_text("".join(source))
(work / "later").write_text("".join(f"{line}\n" for line in LATER))
END
pip download --no-deps --no-build-isolation --dest "$work/source.d" -r "$work/source"
for python in "${PYTHONS[@]}"; do
    pip download --no-deps --only-binary=:all: --python-version "$python" --dest "$work/$python.d" -r "$work/pins"
done
pip download --no-deps --only-binary=:all: --python-version 3.13 --dest "$work/3.13.d" -r "$work/later"
.venv/bin/python - "$work" > "$work/lock" <<'END'
import hashlib
import re
import sys
from pathlib import Path

work = Path(sys.argv[1])
hashes = {}
for path in sorted(work.glob("*.d/*")):
    name = re.sub(r"[-_.]+", "-", re.match(r"(.+?)-\d", path.name)[1]).lower()
    hashes.setdefault(name, set()).add(hashlib.sha256(path.read_bytes()).hexdigest())
pins = [(pin, "") for file in ("pins", "source") for pin in (work / file).read_text().split()]
pins += [(pin, ' ; python_version >= "3.13"') for pin in (work / "later").read_text().split()]
print("# Written by scripts/lock.sh.")
for pin, marker in sorted(pins):
    print(pin + marker, *(f"--hash=sha256:{sha256}" for sha256 in sorted(hashes[pin.partition("==")[0]])))
END
mv "$work/lock" scripts/requirements.lock
echo "lock: $(grep -c == scripts/requirements.lock) packages in scripts/requirements.lock"
