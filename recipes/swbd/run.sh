#!/usr/bin/env bash
# Switchboard, alone (300 h) or with Fisher (2,000 h), tested on Hub5'00 or RT-03: telephone conversations of the LDC.
#   recipes/swbd/run.sh --swbd DIR --eval2000 DIR --eval2000-text DIR [--fisher1-speech DIR --fisher1-text DIR ...]
# Repeat the same options with --stage N. Discs may be in any folders below the one that is named. Everything that is
# missing is named before work starts.
#   --swbd DIR                         LDC97S62: Switchboard-1
#   --transcripts DIR                  swb_ms98_transcriptions of Mississippi State (default: on that disc, or download)
#   --fisher1-speech, --fisher1-text DIR   LDC2004S13, LDC2004T19: Fisher part 1. Text alone serves the language model
#   --fisher2-speech, --fisher2-text DIR   LDC2005S13, LDC2005T19: Fisher part 2
#   --eval2000, --eval2000-text DIR    LDC2002S09, LDC2002T43: Hub5'00
#   --rt03 DIR                         LDC2007S10: RT-03
#   --test hub5|rt03                   the test set (default hub5)
#   --lexicon FILE                     pronunciations (default: those of the Mississippi State release)
[ -n "${BASH_VERSION-}" ] || exec bash "$0" "$@"      # sh run.sh
declare -A path_options value_options=([--test]=corpus.prepare.test)
for option in swbd transcripts fisher1-speech fisher1-text fisher2-speech fisher2-text eval2000 eval2000-text rt03 lexicon; do
    path_options[--$option]=corpus.prepare.${option//-/_}
done
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/recipe.sh" swbd "$@"
if [[ " ${overrides[*]-} " == *" corpus.prepare.test=rt03 "* ]]; then
    overrides+=("~corpus.subsets.ch" "+corpus.subsets.fsh=fsh_")
fi

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
