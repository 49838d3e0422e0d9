#!/usr/bin/env bash
# HarperValleyBank: simulated calls to a bank, free, 8 kHz, two sides per call.
#   --data-dir DIR   the repository cricketclub/gridspace-stanford-harper-valley (default: download 0.7 GB)
#   --lexicon FILE   pronunciations (default: download LibriSpeech's)
#   --split NAME     hash (default), or a published split by speaker: creators, espnet
[ -n "${BASH_VERSION-}" ] || exec bash "$0" "$@"      # sh run.sh
declare -A path_options=([--data-dir]=data_dir [--lexicon]=corpus.prepare.lexicon) value_options=([--split]=corpus.prepare.split)
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/recipe.sh" hvb "$@"

stage 0 data
stage 1 lang
stage 2 features
stage 3 align
stage 4 speaker
stage 5 egs
stage 6 train
stage 7 decode
stage 8 rescore
stage 9 score
stage 10 report
