"""Work of stage lang: the lexicon files and L into one folder, a language model and G into another.

Stage align adds a copy of the first with probabilities that it estimates.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

from asr_am.errors import InputError
from asr_am.lang.arpa import Arpa, listed_share, perplexity, read_arpa, write_arpa
from asr_am.lang.fst_file import write_fst
from asr_am.lang.fsts import make_grammar, make_lexicon_fst, make_silence_lexicon_fst, restrict, with_unknown
from asr_am.lang.lang_dir import UNSEEN, Lang, read_symbols, vocabulary, write_symbols
from asr_am.lang.lexicon import SILENCE, UNKNOWN, Lexicon, disambiguate, mark_positions, read_lexicon
from asr_am.lang.lexicon_probs import PairCounts, estimate_probs
from asr_am.lang.ngram import estimate
from asr_am.lang.ngram_automaton import LmPair, NgramAutomaton
from asr_am.lang.prune import prune
from asr_am.lang.transcripts import read_sentences, read_transcripts, unknown_share

log = logging.getLogger(__name__)

KNOWN_SHARE = 0.9  # of the n-grams of dev in an LM that was estimated on them
LM, FIRST_PASS = "lm.arpa", "first_pass.arpa"  # the model, and the pruned one of the decoding graph
UNSEEN_ORDER, UNSEEN_NGRAMS = 3, 200_000


def prepare_lang(data_dir: Path, out: Path, *, position_dependent: bool, silence_prob: float) -> None:
    """Writes phones.txt, words.txt, lexicon.txt, L.fst, L_disambig.fst and lang.json.

    Args:
        data_dir: has lexicon.txt, and optionally nonspeech.txt and lexiconp.txt (probabilities of pronunciations).
        silence_prob: probability of the optional silence between words, at least 0 and below 1.

    Raises:
        InputError: `silence_prob` is out of range, or the lexicon is refused (see `read_lexicon`).
    """
    if not 0.0 <= silence_prob < 1.0:
        raise InputError(f"silence_prob={silence_prob}: must be at least 0 and below 1")
    lexicon = _load_lexicon(data_dir, position_dependent)
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
        write_fst(fst, out / name)
    _write_description(lexicon, out / "lang.json")
    counts = len(plain), len(lexicon.words), len(lexicon.roots)
    log.info("lexicon: %d pronunciations of %d words, %d phones (stress and tone aside)", *counts)


def add_probs(data_dir: Path, lang_dir: Path, counts: PairCounts, out: Path) -> None:
    """Writes a copy of a lang directory whose L has estimated probabilities of pronunciations and of silence.

    Args:
        out: output folder, also for Kaldi's lexiconp_silprob.txt and silprob.txt.
    """
    lang = Lang.load(lang_dir)
    numbered, highest = disambiguate(_load_lexicon(data_dir, lang.position_dependent).entries)
    probs = estimate_probs([entry for entry, _ in numbered], counts)
    for name in ("phones.txt", "words.txt", "lexicon.txt", "lang.json"):
        shutil.copyfile(lang_dir / name, out / name)
    numbers = [number for _, number in numbered]
    for name, own, symbol in (
        ("L.fst", [0] * len(numbers), None), ("L_disambig.fst", numbers, f"#{highest + 1}")
    ):  # fmt: skip
        fst = make_silence_lexicon_fst(probs, own, lang.phones, lang.words, silence=SILENCE, silence_disambig=symbol)
        write_fst(fst, out / name)
    probs.save(out)
    log.info("silence follows %.0f %% of the words, and begins %.0f %% of the utterances",
             100 * probs.overall, 100 * probs.start)  # fmt: skip


def _load_lexicon(data_dir: Path, position_dependent: bool) -> Lexicon:
    lexicon = read_lexicon(*(data_dir / name for name in ("lexicon.txt", "nonspeech.txt", "lexiconp.txt")))
    return mark_positions(lexicon) if position_dependent else lexicon


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
    max_ngrams: int | None = None, min_count: int = 1, unknown: float | None = 0.0,
) -> None:  # fmt: skip
    """Writes lm.arpa, G.fst and lm.json (description of the model and its perplexity on the dev transcripts).

    Give either `order`, for a Kneser-Ney model of data_dir/lm/<text>.txt over the words of the lexicon, or `arpa`, for
    an existing model. lm.arpa is that model without words outside the lexicon. If it has more than `max_ngrams`
    n-grams, G.fst is made from first_pass.arpa, the model pruned to that size. Lattices are then rescored with
    large.npz, the automaton of lm.arpa, in place of small.npz, that of first_pass.arpa.

    Args:
        arpa: name of a file in data_dir/lm/ or path of an existing model, or None.
        max_ngrams: maximum number of n-grams of order 2 and above in the decoding graph, or None.
        min_count: occurrences of a trigram or longer n-gram to be in a new model.
        unknown: unigram probability of words that the lexicon lacks, None for their share of the training transcripts.
            With 0 none is recognised.

    Raises:
        InputError: both or neither of `order` and `arpa`, a damaged ARPA file or text, a model for another lexicon.
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
        remedy = f"set corpus.lms.{name}.text to the name of another text in that folder, or run stage 0 (data) again"
        model = estimate(read_sentences(source, remedy), vocabulary(words), order, min_count)
    used, dropped = restrict(model, words, str(source))
    if arpa is not None and dropped:
        log.warning("%s: dropped %d words outside the lexicon: %s", source, len(dropped), " ".join(dropped[:10]))
    if unknown is None:
        unknown = unknown_share(data_dir, words)
    used = with_unknown(used, unknown)
    write_arpa(used, out / LM)
    first_pass = used if max_ngrams is None else prune(used, max_ngrams)
    if first_pass is not used:
        write_arpa(first_pass, out / FIRST_PASS)
        LmPair(*(NgramAutomaton.from_arpa(arpa, words) for arpa in (first_pass, used))).save(out)
    make_grammar(out / (LM if first_pass is used else FIRST_PASS), lang_dir / "words.txt", out / "G.fst")
    _write_summary(name, used, first_pass, dropped, unknown, source, data_dir, out / "lm.json", given=arpa is not None)
    if knows_dev(out) and (data_dir / "lm" / f"{text}.txt").is_file():
        (out / UNSEEN).mkdir(exist_ok=True)
        model = estimate(read_sentences(data_dir / "lm" / f"{text}.txt", ""), vocabulary(words), UNSEEN_ORDER)
        unseen = with_unknown(restrict(model, words, text)[0], unknown)
        write_arpa(prune(unseen, UNSEEN_NGRAMS), out / UNSEEN / LM)
        make_grammar(out / UNSEEN / LM, lang_dir / "words.txt", out / UNSEEN / "G.fst")


def knows_dev(lm_dir: Path) -> bool:
    """Returns True if an LM was probably estimated on the dev transcripts. Raises InputError if lm.json is damaged."""
    path = lm_dir / "lm.json"
    try:
        return float(json.loads(path.read_text(encoding="utf-8")).get("dev_listed", 0.0)) >= KNOWN_SHARE
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: missing or damaged ({error}); run stage 1 (lang) again") from error


def _find_arpa(data_dir: Path, name: str, arpa: str) -> Path:
    path = Path(arpa).expanduser()
    for candidate in (data_dir / "lm" / path, path):  # an absolute path stays as it is in both
        if candidate.is_file():
            return candidate
    raise InputError(f"{arpa}: no such ARPA file, neither in {data_dir / 'lm'} nor here; set corpus.lms.{name}.arpa")


def _write_summary(
    name: str, arpa: Arpa, first_pass: Arpa, dropped: list[str], unknown: float, source: Path, data_dir: Path,
    path: Path, *, given: bool,
) -> None:  # fmt: skip
    dev = [words for _, words in read_transcripts(data_dir, "dev")]
    on_dev = perplexity(arpa, dev)
    summary: dict[str, object] = {
        "name": name,
        "source": source.name,
        "order": arpa.order,
        "ngrams": [len(ngrams) for ngrams in arpa.logprobs],
        "words_dropped": len(dropped),
        "unknown": round(unknown, 6),
        "dev_perplexity": on_dev.perplexity,
        "dev_sentences": on_dev.sentences,
        "dev_words": on_dev.words,
        "dev_oov": on_dev.oov,
    }
    if first_pass is not arpa:
        counts, value = [len(ngrams) for ngrams in first_pass.logprobs], perplexity(first_pass, dev).perplexity
        summary["first_pass"] = {"ngrams": counts, "dev_perplexity": value}
        log.info("%s: pruned to %d n-grams for the decoding graph, dev perplexity %.2f", name, sum(counts[1:]), value)
    if given:  # models that are estimated here never see dev
        summary["dev_listed"] = listed = round(listed_share(arpa, dev), 4)
        if listed >= KNOWN_SHARE:
            log.warning(
                "LM %s lists %.0f %% of the n-grams of dev, so it was probably estimated on them: LM weights are "
                "chosen with a trigram of the training text instead; better give a dev set that the LM does not know",
                name, 100 * listed,
            )  # fmt: skip
    path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    outside = f"{on_dev.oov} of {on_dev.words} words outside"
    log.info("language model %s: dev perplexity %.2f, %s", name, on_dev.perplexity, outside)
