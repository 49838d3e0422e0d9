#!/usr/bin/env bash
# Your own data: Kaldi data directories, a lexicon, and a text or an ARPA file for the language model.
#   recipes/kaldi/run.sh --name NAME --train DIR --test DIR [--dev DIR] --lexicon FILE [--text FILE | --arpa FILE]
# Repeat the same options with --stage N. Results go to exp/NAME.
#   --name NAME           name of the data, not that of a recipe
#   --train, --test DIR   wav.scp (wav, flac, mp3, ogg, sphere, Kaldi archives), text, utt2spk. Optional: segments,
#                         reco2file_and_channel, spk2gender, stm, glm
#   --dev DIR             default: hold out about 8 % of the training speech, at least two speakers, at most 5 hours
#   --lexicon FILE        WORD [PROBABILITY] PHONE PHONE ... Other words become the unknown word and are counted
#   --g2p espeak          pronounce those of --train and --text with espeak-ng, in the phones of the lexicon
#   --text FILE           sentences to estimate a trigram LM on (default: the training transcripts)
#   --arpa FILE           an n-gram LM instead
#   --audio-root DIR      base of relative paths in wav.scp (default: its folder or the nearest one above; in commands:
#                         the repository)
#   --sampling-rate N     8000 or 16000 (default). Audio of other rates is resampled when read
#   --allow-pipes         run the commands in wav.scp
# Uses the first of two channels unless segments or reco2file_and_channel name another. Utterances without audio, words or
# speaker are left out and counted. The log of stage 0 ends with a table of everything that was corrected.
[ -n "${BASH_VERSION-}" ] || exec bash "$0" "$@"      # sh run.sh
declare -A path_options=(
    [--train]=corpus.prepare.train [--test]=corpus.prepare.test [--dev]=corpus.prepare.dev
    [--lexicon]=corpus.prepare.lexicon [--text]=corpus.prepare.text [--arpa]=corpus.prepare.arpa
    [--audio-root]=corpus.prepare.audio_root
)
declare -A value_options=([--name]=corpus.name [--sampling-rate]=corpus.sampling_rate [--g2p]=corpus.prepare.g2p)
declare -A flag_options=([--allow-pipes]=corpus.prepare.allow_pipes=true)
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/recipe.sh" kaldi "$@"
overridden corpus.name || fail "--name is missing; give the data a name"
if overridden corpus.prepare.arpa; then
    overrides+=("~corpus.lms.kn3" "+corpus.lms.given={arpa:given.arpa,max_ngrams:200000}")
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
