#!/usr/bin/env bash
# Generated two-party telephone conversations (synthetic speech). Goes from nothing to word error rates on a
# Switchboard-like (swb) and a harder CallHome-like (ch) test set in 6 to 10 minutes on two cores.
[ -n "${BASH_VERSION-}" ] || exec bash "$0" "$@"      # sh run.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/recipe.sh" minicts "$@"

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
