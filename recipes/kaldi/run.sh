#!/usr/bin/env bash
# Your own data: Kaldi data directories, a lexicon, and a text or an ARPA file for the language model. Or one folder of
# recordings with transcripts beside them, for error rates and for TextGrids of all words and phones.
#   recipes/kaldi/run.sh --name NAME --train DIR --test DIR [--dev DIR] --lexicon FILE [--text FILE | --arpa FILE]
#   recipes/kaldi/run.sh --name NAME --folder DIR [--lexicon FILE]
# Repeat the same options with --stage N. Results go to exp/NAME. Below 3 minutes of training speech the GMMs are not
# adapted to speakers (align=triphone features=logmel), which a line says.
#   --name NAME           name of the data, not that of a recipe
#   --train, --test DIR   wav.scp (wav, flac, mp3, ogg, sphere, Kaldi archives), text, utt2spk. Optional: segments,
#                         reco2file_and_channel, spk2gender, stm, glm. Or lhotse manifests: a file of cuts or recordings,
#                         or a folder with one set of them. Their names are those that lhotse gives
#   --dev DIR             default: hold out about 8 % of the training speech, at least two speakers, at most 5 hours
#   --folder DIR          a.wav and a.txt, b.wav and b.txt, ... The subfolder is the speaker, or the name up to - or _.
#                         dev and test are held out. TextGrids of all go to exp/NAME/alignments
#   --lexicon FILE        WORD [PROBABILITY] PHONE PHONE ... Other words become the unknown word and are counted.
#                         Without a lexicon: --g2p espeak or --g2p letters
#   --g2p espeak          pronounce those of --train and --text with espeak-ng (.venv/bin/pip install '.[minicts]'), in
#                         the phones of the lexicon, or without --lexicon in espeak's own
#   --g2p phonetisaurus   ... with a model trained on the lexicon (.venv/bin/pip install phonetisaurus)
#   --g2p letters         their letters are their phones. The default with --folder and without --lexicon
#   --text FILE           sentences to estimate a trigram LM on (default: the training transcripts)
#   --arpa FILE           an n-gram LM instead
#   --audio-root DIR      base of relative paths in wav.scp and manifests (default: their folder, the nearest one above, or
#                         the working folder; in commands: the repository)
#   --sampling-rate N     8000 or 16000 (default). Audio of other rates is resampled when read
#   --allow-pipes         run the commands in wav.scp
#   --unify-words         words that differ only in case, apostrophes or invisible characters are one word. Otherwise
#                         those that the lexicon has twice stay two words, and scoring keeps them apart too
# Uses the first of two channels unless segments or reco2file_and_channel name another. Utterances without audio, words or
# speaker are left out and counted. The log of stage 0 ends with a table of everything that was corrected.
[ -n "${BASH_VERSION-}" ] || exec bash "$0" "$@"      # sh run.sh
declare -A path_options=(
    [--train]=corpus.prepare.train [--test]=corpus.prepare.test [--dev]=corpus.prepare.dev
    [--lexicon]=corpus.prepare.lexicon [--text]=corpus.prepare.text [--arpa]=corpus.prepare.arpa
    [--audio-root]=corpus.prepare.audio_root [--folder]=+corpus.prepare.folder
)
declare -A value_options=([--name]=corpus.name [--sampling-rate]=corpus.sampling_rate [--g2p]=corpus.prepare.g2p)
declare -A flag_options=([--allow-pipes]=corpus.prepare.allow_pipes=true [--unify-words]=+corpus.prepare.unify_words=true)
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/recipe.sh" kaldi "$@"
overridden corpus.name || fail "--name is missing; give the data a name"
if overridden corpus.prepare.arpa; then
    overrides+=("~corpus.lms.kn3" "+corpus.lms.given={arpa:given.arpa,max_ngrams:200000}")
fi
if overridden +corpus.prepare.folder; then
    overrides+=("corpus.aligned_sets=[train,dev,test]")
fi

stage 0 data
by_size=$(python -m local.kaldi.small "${overrides[@]}")
[ -z "$by_size" ] || mapfile -t -O "${#overrides[@]}" overrides <<< "$by_size"
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
