"""The work of stage `lang`: lexicon files and L into one directory, a language model and G into another."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from asr_am.errors import InputError
from asr_am.lang.arpa import Arpa, perplexity, read_arpa, write_arpa
from asr_am.lang.fsts import make_grammar, make_lexicon_fst, restrict
from asr_am.lang.lang_dir import read_symbols, vocabulary, write_symbols
from asr_am.lang.lexicon import SILENCE, UNKNOWN, Lexicon, disambiguate, mark_positions, read_lexicon
from asr_am.lang.ngram import estimate
from asr_am.lang.prune import prune
from asr_am.lang.transcripts import read_sentences, read_transcripts

log = logging.getLogger(__name__)


def prepare_lang(data_dir: Path, out: Path, *, position_dependent: bool, silence_prob: float) -> None:
    """Write phones.txt words.txt lexicon.txt L.fst L_disambig.fst lang.json into `out`.

    data_dir: holds lexicon.txt and maybe nonspeech.txt. silence_prob: of the optional silence between words.
    InputError: see `read_lexicon`; silence_prob out of [0, 1).
    """
    if not 0.0 <= silence_prob < 1.0:
        raise InputError(f"silence_prob {silence_prob}: must be at least 0 and below 1")
    lexicon = read_lexicon(data_dir / "lexicon.txt", data_dir / "nonspeech.txt")
    if position_dependent:
        lexicon = mark_positions(lexicon)
    numbered, highest = disambiguate(lexicon.entries)
    silence_disambig = f"#{highest + 1}"
    disambig = [f"#{number}" for number in range(highest + 2)]
    phones = _symbols("<eps>", *lexicon.silence_phones, *lexicon.nonsilence_phones, *disambig)
    words = _symbols("<eps>", *lexicon.words, "#0", "<s>", "</s>")
    write_symbols(out / "phones.txt", phones)
    write_symbols(out / "words.txt", words)
    lines = [f"{entry.word} {' '.join(entry.phones)}\n" for entry in lexicon.entries]
    (out / "lexicon.txt").write_text("".join(lines), encoding="utf-8")
    plain = [(entry, 0) for entry in lexicon.entries]
    for name, entries, symbol in (("L.fst", plain, None), ("L_disambig.fst", numbered, silence_disambig)):
        fst = make_lexicon_fst(
            entries, phones, words, silence=SILENCE, silence_prob=silence_prob, silence_disambig=symbol
        )
        fst.write(str(out / name))
    _write_description(lexicon, out / "lang.json")
    counts = len(plain), len(lexicon.words), len(lexicon.roots)
    log.info("lexicon: %d pronunciations of %d words, %d phones (stress and tone aside)", *counts)


def _symbols(*names: str) -> dict[str, int]:
    return {name: number for number, name in enumerate(names)}


def _write_description(lexicon: Lexicon, path: Path) -> None:
    description = {
        "silence_phones": lexicon.silence_phones,
        "nonsilence_phones": lexicon.nonsilence_phones,
        "optional_silence": SILENCE,
        "unk": UNKNOWN,
        "position_dependent": lexicon.position_dependent,
        "roots": lexicon.roots,
    }
    path.write_text(json.dumps(description, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def prepare_lm(
    data_dir: Path, lang_dir: Path, out: Path, *, name: str, order: int | None, arpa: str | None, text: str,
    max_ngrams: int | None = None,
) -> None:  # fmt: skip
    """Write lm.arpa, G.fst and lm.json (what the model is, its perplexity on the dev transcripts) into `out`.

    Either `order`: Kneser-Ney on data_dir/lm/<text>.txt over the words of the lexicon; or `arpa`: a given model, by the
    name of a file in data_dir/lm/ or by its path. lm.arpa holds it without the words that the lexicon lacks, pruned to
    `max_ngrams` n-grams of order 2 and above.
    InputError: both or neither given, a broken ARPA file or text, a model for another lexicon.
    """
    if (order is None) == (arpa is None):
        raise InputError(f"corpus.lms.{name}: give either an order or an ARPA file (order, arpa)")
    if max_ngrams is not None and (not isinstance(max_ngrams, int) or max_ngrams < 0):
        raise InputError(f"corpus.lms.{name}.max_ngrams={max_ngrams}: must be a whole number, at least 0")
    words = read_symbols(lang_dir / "words.txt")
    if arpa is not None:
        source = _find_arpa(data_dir, name, arpa)
        model = read_arpa(source)
    else:
        assert order is not None
        source = data_dir / "lm" / f"{text}.txt"
        remedy = f"set corpus.lms.{name}.text to the name of a text beside it, or run stage 0 (data) again"
        model = estimate(read_sentences(source, remedy), vocabulary(words), order)
    used, dropped = restrict(model, words, str(source))
    if arpa is not None and dropped:
        log.warning("%s: dropped %d words outside the lexicon: %s", source, len(dropped), " ".join(dropped[:10]))
    if max_ngrams is not None:
        used = prune(used, max_ngrams)
    write_arpa(used, out / "lm.arpa")
    make_grammar(out / "lm.arpa", lang_dir / "words.txt", out / "G.fst")
    _write_summary(name, used, dropped, source, data_dir, out / "lm.json")


def _find_arpa(data_dir: Path, name: str, arpa: str) -> Path:
    path = Path(arpa).expanduser()
    for candidate in (data_dir / "lm" / path, path):  # the corpus' own first; an absolute path is both
        if candidate.is_file():
            return candidate
    raise InputError(f"{arpa}: no such ARPA file, neither in {data_dir / 'lm'} nor here; set corpus.lms.{name}.arpa")


def _write_summary(name: str, arpa: Arpa, dropped: list[str], source: Path, data_dir: Path, path: Path) -> None:
    on_dev = perplexity(arpa, (words for _, words in read_transcripts(data_dir, "dev")))
    summary = {
        "name": name,
        "source": source.name,
        "order": arpa.order,
        "ngrams": [len(ngrams) for ngrams in arpa.logprobs],
        "words_dropped": len(dropped),
        "dev_perplexity": on_dev.perplexity,
        "dev_sentences": on_dev.sentences,
        "dev_words": on_dev.words,
        "dev_oov": on_dev.oov,
    }
    path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    outside = f"{on_dev.oov} of {on_dev.words} words outside"
    log.info("language model %s: dev perplexity %.2f, %s", name, on_dev.perplexity, outside)
