#!/usr/bin/env bash
# LibriSpeech: read English books, free, 16 kHz. Trains on mini_librispeech (5 h) unless told otherwise, see
# conf/corpus/librispeech.yaml.
#   --data-dir DIR   folder with the parts, or with LibriSpeech/ that holds them (default: download)
#   --lexicon FILE   pronunciations (default: download LibriSpeech's)
#   --arpa FILE      n-gram LM (default: download LibriSpeech's pruned trigram)
[ -n "${BASH_VERSION-}" ] || exec bash "$0" "$@"      # sh run.sh
declare -A path_options=([--data-dir]=data_dir [--lexicon]=corpus.prepare.lexicon [--arpa]=corpus.prepare.arpa)
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/recipe.sh" librispeech "$@"

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
