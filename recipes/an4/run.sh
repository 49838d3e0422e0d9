#!/usr/bin/env bash
# CMU AN4 (census): 42 minutes of real speech, free, 16 kHz. Trains three seeds and decodes with three language models.
#   --data-dir DIR   an4_raw.bigendian.tar.gz, a folder with it, or the unpacked an4/ (default: download)
[ -n "${BASH_VERSION-}" ] || exec bash "$0" "$@"      # sh run.sh
declare -A path_options=([--data-dir]=data_dir)
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/recipe.sh" an4 "$@"

stage 0 data
stage 1 lang
stage 2 features
stage 3 align
stage 4 speaker
stage 5 egs
stage 6 train seed=1,2,3
stage 7 decode seed=1,2,3
stage 8 rescore seed=1,2,3
stage 9 score seed=1,2,3
stage 10 report
