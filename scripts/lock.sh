#!/usr/bin/env bash
# Writes scripts/requirements.lock: every package that scripts/setup.sh installs beside torch, with its version and the
# SHA-256 of its file for Linux x86-64 and Python 3.11. Run it after a change to the dependencies in pyproject.toml.
# Needs a finished .venv and PyPI itself: the files of another index may differ.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

report=$(mktemp)
trap 'rm -f "$report"' EXIT
PIP_CONFIG_FILE=/dev/null env -u PIP_FIND_LINKS -u PIP_INDEX_URL -u PIP_EXTRA_INDEX_URL \
    .venv/bin/pip install --quiet --dry-run --ignore-installed --report "$report" '.[minicts,dev]'
.venv/bin/python - "$report" > scripts/requirements.lock.tmp <<'END'
import json
import re
import sys

LOCAL = ("torch", "asr-am")  # torch comes from another index, see setup.sh. Ours is not downloaded.
OF_TORCH = ("nvidia-", "triton", "cuda-")  # of its GPU builds, which pip installs with torch
lines = []
for item in json.load(open(sys.argv[1]))["install"]:
    name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
    if name not in LOCAL and not name.startswith(OF_TORCH):
        sha256 = item["download_info"]["archive_info"]["hashes"]["sha256"]
        lines.append(f"{name}=={item['metadata']['version']} --hash=sha256:{sha256}")
print("# Written by scripts/lock.sh.")
print("\n".join(sorted(lines)))
END
mv scripts/requirements.lock.tmp scripts/requirements.lock
echo "lock: $(grep -c == scripts/requirements.lock) packages in scripts/requirements.lock"
