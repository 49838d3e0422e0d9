"""Stage 1, lang: lexicon and L in exp/<corpus>/lang, each n-gram LM and its G in exp/<corpus>/lm/<name>."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from asr_am.stages.app import corpus_dir, stage, values
from asr_am.stages.target import Target


def targets(cfg: DictConfig) -> list[Target]:
    """Returns the lexicon and each LM of `corpus.lms`."""
    root = corpus_dir(cfg)
    options = values(cfg.corpus.lang)
    lang = Target(root / "lang", [root / "data"], options, partial(lexicon, root / "data", options))
    lms = []
    for name, lm in values(cfg.corpus.lms).items():
        inputs = [root / "data", root / "lang"]
        if lm.get("arpa") and not (root / "data/lm" / lm["arpa"]).is_file():  # a file outside the corpus
            inputs += [path for path in [Path(lm["arpa"]).expanduser()] if path.is_file()]
        build = partial(language_model, root / "data", root / "lang", name, lm)
        lms.append(Target(root / "lm" / name, inputs, lm, build))
    return [lang, *lms]


def lexicon(data_dir: Path, options: dict, out: Path) -> None:
    """Writes lexicon, symbol tables and L, and checks the transcripts against them."""
    from asr_am.lang.lang_dir import Lang
    from asr_am.lang.prepare import prepare_lang
    from asr_am.lang.transcripts import check_transcripts

    prepare_lang(data_dir, out, position_dependent=options["position_dependent"], silence_prob=options["silence_prob"])
    check_transcripts(data_dir, Lang.load(out), out, oov=options["oov"])


def language_model(data_dir: Path, lang_dir: Path, name: str, lm: dict, out: Path) -> None:
    """Writes an n-gram LM as G: estimated on a text of the corpus, or given as an ARPA file."""
    from asr_am.lang.prepare import prepare_lm

    prepare_lm(
        data_dir, lang_dir, out, name=name, order=lm.get("order"), arpa=lm.get("arpa"), text=lm.get("text", "train"),
        max_ngrams=lm.get("max_ngrams"),
    )  # fmt: skip


main = stage("lang", targets)

if __name__ == "__main__":
    main()
