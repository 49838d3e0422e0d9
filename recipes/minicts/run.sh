#!/usr/bin/env bash
# Generated two-party telephone conversations (synthetic speech). Goes from nothing to word error rates on a
# Switchboard-like (swb) and a harder CallHome-like (ch) test set in 8 to 20 minutes on two cores.
# Unless overridden, the network is a Conformer (model=conformer), which makes fewer errors here than the configured bi-LSTM
# (recipes/NOTES.md), and lattices are rescored by an LSTM LM (rescore=true). Overrides of model.* apply to the configured
# model, and +experiment=NAME takes both as configured.
[ -n "${BASH_VERSION-}" ] || exec bash "$0" "$@"      # sh run.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/recipe.sh" minicts "$@"

network=(model=conformer) rescoring=(rescore=true)
for override in "${overrides[@]}"; do
    case $override in
        model=* | model.* | +model.* | ++model.*) network=() ;;
        +experiment=*) network=() rescoring=() ;;
    esac
done

stage 0 data
stage 1 lang
stage 2 features
stage 3 align
stage 4 speaker
stage 5 egs
stage 6 train "${network[@]}"
stage 7 decode "${network[@]}"
stage 8 rescore "${network[@]}" "${rescoring[@]}"
stage 9 score "${network[@]}" "${rescoring[@]}"
stage 10 report "${network[@]}" "${rescoring[@]}"
