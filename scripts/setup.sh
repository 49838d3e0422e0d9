#!/usr/bin/env bash
# Makes .venv in the repository root with everything the recipes and tests need, once; later calls return at once.
#   PYTHON=python3.11 scripts/setup.sh
# torch comes first and pinned: asked for by another package, pip would take whatever build is newest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

torch=torch==2.13.0
stamp=.venv/.set-up-$(cat pyproject.toml scripts/setup.sh | sha256sum | cut -c1-16)
[ -e "$stamp" ] && exit 0

exec 9>.setup.lock
flock 9                                    # two recipes started at once: the second waits for the first
[ -e "$stamp" ] && exit 0

find_python() {
    for python in "${PYTHON:-}" python3.11 python3 python; do
        if [ -n "$python" ] && "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            echo "$python"
            return
        fi
    done
    echo "setup: needs Python 3.11; install it, or name it: PYTHON=/path/to/python3.11 $0" >&2
    exit 1
}

# On a box without a GPU the registry's default build would bring gigabytes of CUDA, unless pip already knows a CPU
# wheel; only then are PyTorch's own CPU wheels asked for.
install_torch() {
    if ! command -v nvidia-smi >/dev/null \
        && ! .venv/bin/pip install --dry-run --no-deps -qq --report - "$torch" | grep -q 'torch-[^/]*cpu'; then
        .venv/bin/pip install -qq --index-url https://download.pytorch.org/whl/cpu "$torch"
    else
        .venv/bin/pip install -qq "$torch"
    fi
}

# The registry's torchaudio is linked against CUDA and cannot load its extension beside a CPU torch. All that is used
# here runs in Python, without the extension.
mend_torchaudio() {
    local folder
    if .venv/bin/python -c 'import torch, sys; sys.exit(torch.version.cuda is not None)' \
        && ! .venv/bin/python -c 'import torchaudio' 2>/dev/null; then
        folder=$(.venv/bin/python -c 'import importlib.util as u; print(u.find_spec("torchaudio").submodule_search_locations[0])')
        echo "setup: torch is a CPU build; removing torchaudio's CUDA extension: $(cd "$folder/lib" && ls ./*.so | xargs)"
        rm -f "$folder"/lib/*.so
    fi
    .venv/bin/python -c 'import torchaudio'
}

# Some virtual machines promise a matrix unit (AMX) and then refuse its instructions, which kills the process. There,
# bfloat16 products go without it, from the start of every Python here.
avoid_broken_amx() {
    local product='import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a' status=0 packages
    packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    rm -f "$packages/without_amx.pth"
    { .venv/bin/python -c "$product"; } 2>/dev/null || status=$?
    if [ "$status" = 132 ]; then           # SIGILL
        echo "setup: this machine's AMX instructions do not work; matrix products are told to avoid them"
        echo 'import os; os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")' > "$packages/without_amx.pth"
        .venv/bin/python -c "$product"
    fi
}

begin=$SECONDS
echo "setup: making .venv (about two minutes, once)"
[ -x .venv/bin/python ] || "$(find_python)" -m venv .venv
install_torch
.venv/bin/pip install -qq -e '.[minicts,dev]'
mend_torchaudio
avoid_broken_amx
rm -f .venv/.set-up-*
touch "$stamp"
echo "setup: done in $((SECONDS - begin)) s"
