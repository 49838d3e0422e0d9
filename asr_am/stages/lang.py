"""Stage 1, lang: lexicon and L in exp/<corpus>/lang; each n-gram LM and its G in exp/<corpus>/lm/<name>."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from asr_am.stages.app import corpus_dir, stage, values
from asr_am.stages.target import Target


def units(cfg: DictConfig) -> list[Target]:
    """The lexicon's unit, then one per LM in `corpus.lms`."""
    root = corpus_dir(cfg)
    options = values(cfg.corpus.lang)
    lang = Target(root / "lang", [root / "data"], options, partial(lexicon, root / "data", options))
    lms = []
    for name, lm in values(cfg.corpus.lms).items():
        inputs = [root / "data", root / "lang"]
        if lm.get("arpa") and not (root / "data/lm" / lm["arpa"]).is_file():  # not the corpus' own
            inputs += [path for path in [Path(lm["arpa"]).expanduser()] if path.is_file()]
        work = partial(language_model, root / "data", root / "lang", name, lm)
        lms.append(Target(root / "lm" / name, inputs, lm, work))
    return [lang, *lms]


def lexicon(data_dir: Path, options: dict, out: Path) -> None:
    """Lexicon, symbol tables and L; then the transcripts against them."""
    from asr_am.lang.lang_dir import Lang
    from asr_am.lang.prepare import prepare_lang
    from asr_am.lang.transcripts import check_transcripts

    prepare_lang(data_dir, out, position_dependent=options["position_dependent"], silence_prob=options["silence_prob"])
    check_transcripts(data_dir, Lang.load(out), out, oov=options["oov"])


def language_model(data_dir: Path, lang_dir: Path, name: str, lm: dict, out: Path) -> None:
    """An n-gram LM estimated on the corpus' text, or one given in ARPA form, as G."""
    from asr_am.lang.prepare import prepare_lm

    prepare_lm(
        data_dir, lang_dir, out, name=name, order=lm.get("order"), arpa=lm.get("arpa"), text=lm.get("text", "train"),
        max_ngrams=lm.get("max_ngrams"),
    )  # fmt: skip


main = stage("lang", units)

if __name__ == "__main__":
    main()
