#!/usr/bin/env bash
# Proves every path that uses a GPU with one command, in under 9 minutes: a table of PASS and FAIL, and one JSON.
#   scripts/gpu_check.sh [--device cpu] [--small] [--only SECTION ...] [--out FOLDER]
# Needs a Python of 3.11 to 3.13 with torch (PYTHON=python3), and no network. Packages that this Python lacks are taken
# from the folder of wheels, which this fills where there is a network (--without: packages the other machine has):
#   scripts/gpu_check.sh --collect [--python 3.12] [--without numpy scipy ...]
# WHEELS=FOLDER names another one than wheels/. --device cpu --small rehearses it without a GPU, in seconds.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
wheels=${WHEELS:-wheels}

if [ "${1:-}" = --collect ]; then
    exec "$python" scripts/gpu_check/wheels.py collect "$wheels" "${@:2}"
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
out=(--out "exp/gpu_check-$(date +%Y%m%d-%H%M%S)")
case " $* " in *" --out "*) out=() ;; esac
"$python" scripts/gpu_check/wheels.py install "$wheels" "$scratch/packages"
export PYTORCH_NVML_BASED_CUDA_CHECK=1     # CUDA starts in the sections' processes, and not before they are forked
PYTHONPATH=$scratch/packages:.${PYTHONPATH:+:$PYTHONPATH} "$python" -m scripts.gpu_check "${out[@]}" "$@"
