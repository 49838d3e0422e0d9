#!/usr/bin/env bash
# Makes .venv in the repository root with everything the recipes and tests need, once; later calls return at once.
#   PYTHON=python3.11 scripts/setup.sh      (3.11, 3.12 or 3.13)
# torch comes first and pinned: asked for by another package, pip would take whatever build is newest. A CUDA build that
# the Python has already is used as it is. All else is in scripts/requirements.lock with its checksum (scripts/lock.sh
# writes it). May be interrupted at any moment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

torch=torch==2.13.0
lock=scripts/requirements.lock
stamp=.venv/.set-up-$(cat pyproject.toml scripts/setup.sh "$lock" | sha256sum | cut -c1-16)
unfinished=.venv/.unfinished
if [ -e "$stamp" ]; then
    [ -x .venv/bin/python ] && exit 0
    echo "setup: .venv/bin/python: you cannot run it ($(readlink .venv/bin/python)); use a checkout of your own, or a Python that all users can run" >&2
    exit 1
fi

exec 9>.setup.lock
flock 9                                    # two recipes started at once: the second waits for the first
[ -e "$stamp" ] && exit 0

find_python() {
    for python in "${PYTHON:-}" python3.11 python3 python3.12 python3.13 python; do
        if [ -n "$python" ] && "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then
            echo "$python"
            return
        fi
    done
    echo "setup: needs Python 3.11, 3.12 or 3.13; install one, or name it: PYTHON=/path/to/python3.11 $0" >&2
    exit 1
}

fail() {
    rm -f "$unfinished"                    # pip has undone what failed: an earlier .venv still works
    echo "setup: $1" >&2
    exit 1
}

# pip with its output in a log. A failure is one line that says what to do.
pip() {
    local log=.venv/set-up.log
    if ! .venv/bin/python -m pip --disable-pip-version-check --retries 2 "$1" --no-compile "${@:2}" >"$log" 2>&1; then
        if grep -qE 'NewConnectionError|Failed to establish|name resolution|Network is unreachable|Max retries|Timeout|ProxyError' "$log"; then
            fail "no network to PyPI or PyTorch's index; connect, or name a mirror with PIP_INDEX_URL or a folder of wheels with PIP_FIND_LINKS, and start again (log: $log)"
        elif grep -q 'DO NOT MATCH THE HASHES' "$log"; then
            fail "a package is not the one of $lock ($(grep -m1 -oE '[A-Za-z0-9_.-]+==[^ ]+' "$log")); look at the index you use (log: $log)"
        elif grep -q 'No space left' "$log"; then
            fail "the disk is full; free 3 GB and start again"
        fi
        fail "$(grep -m1 '^ERROR' "$log" | cut -c1-200 || echo 'pip failed'); mend it and start again (log: $log)"
    fi
}

# In place of pip, which compiles on one core. Leaves out tests of packages, and files that are no Python of this version.
compile_packages() {
    .venv/bin/python -m compileall -qq -j 0 -x 'site-packages/.*/tests?/' "$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" || true
}

has_cuda_torch() {
    "$1" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' 2>/dev/null
}

# On a box without a GPU the registry's default build would bring gigabytes of CUDA, unless pip already knows a CPU
# wheel; only then are PyTorch's own CPU wheels asked for.
install_torch() {
    if has_cuda_torch .venv/bin/python; then
        echo "setup: torch $(.venv/bin/python -c 'import torch; print(torch.__version__)' 2>/dev/null) is there already"
        return
    fi
    if command -v nvidia-smi >/dev/null; then
        pip install "$torch"               # with CUDA's libraries
        return
    fi
    pip install --dry-run --no-deps --quiet --report .venv/torch.json "$torch"
    if grep -q 'torch-[^/]*cpu' .venv/torch.json || compgen -G ".venv/lib/python3.*/site-packages/torch" >/dev/null; then
        pip install --no-deps "$torch"
    else
        pip install --no-deps --index-url https://download.pytorch.org/whl/cpu "$torch"
    fi
}

# The registry's torchaudio is linked against CUDA and cannot load its extension beside a CPU torch, or a torch of another
# CUDA. All that is used here runs in Python, without the extension.
mend_torchaudio() {
    local folder
    if ! .venv/bin/python -c 'import torchaudio' 2>/dev/null; then
        folder=$(.venv/bin/python -c 'import importlib.util as u; print(u.find_spec("torchaudio").submodule_search_locations[0])')
        case "$folder" in
            "$PWD"/.venv/*) ;;
            *) fail "$folder does not fit the torch of this Python; mend it, or name a Python without it: PYTHON=..." ;;
        esac
        echo "setup: torchaudio's extension does not fit this torch; removing it: $(cd "$folder/lib" && ls ./*.so | xargs)"
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
if [ -e "$unfinished" ] || { [ -e .venv ] && ! .venv/bin/python -m pip --version >/dev/null 2>&1; }; then
    echo "setup: an earlier call was interrupted; starting again"
    rm -rf .venv
fi
if [ ! -e .venv ]; then
    python=$(find_python)
    mkdir .venv
    touch "$unfinished"
    "$python" -m venv .venv >.venv/set-up.log 2>&1 || fail "$(tail -1 .venv/set-up.log) (log: .venv/set-up.log)"
    if has_cuda_torch "$python"; then      # its packages come after those of .venv. It may be a virtual environment itself
        "$python" -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))' \
            > "$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch_outside.pth"
    fi
fi
touch "$unfinished"
install_torch
compile_packages &                         # beside pip, which unpacks the others on one core
pip install --no-deps --require-hashes -r <(grep '^setuptools==' "$lock")    # builds the one package without a wheel
pip install --no-deps --require-hashes --no-build-isolation -r "$lock"
pip install --no-deps --no-build-isolation -e .
wait
compile_packages
mend_torchaudio
avoid_broken_amx
rm -f .venv/.set-up-* "$unfinished"
touch "$stamp"
echo "setup: done in $((SECONDS - begin)) s"
