"""Stage 1, lang: lexicon and L in exp/<corpus>/lang, each n-gram LM and its G in exp/<corpus>/lm/<name>."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from asr_am.errors import InputError
from asr_am.options import build
from asr_am.stages.app import stage
from asr_am.stages.layout import layout
from asr_am.stages.sections import LangOptions, NgramOptions, values
from asr_am.stages.target import Target


def targets(cfg: DictConfig) -> list[Target]:
    """Returns the lexicon and each LM of `corpus.lms`."""
    paths = layout(cfg)
    options = values(cfg.corpus.lang)
    inputs = [paths.data]
    if source := cfg.align.get("lang"):
        options |= {"kaldi": True}
        inputs.append(Path(source))
    lang = Target(paths.lang(), inputs, options, partial(lexicon, paths.data, options, source))
    lms = []
    for name, lm in values(cfg.corpus.lms).items():
        inputs = [paths.data, paths.lang()]
        if lm.get("arpa") and not (paths.texts / lm["arpa"]).is_file():  # a file outside the corpus
            inputs += [path for path in [Path(lm["arpa"]).expanduser()] if path.is_file()]
        estimate = partial(language_model, paths.data, paths.lang(), name, lm)
        lms.append(Target(paths.lm(name), inputs, lm, estimate, version=2))
    return [lang, *lms]


def lexicon(data_dir: Path, options: dict, kaldi: str | None, out: Path) -> None:
    """Writes lexicon, symbol tables and L, those of Kaldi's directory `kaldi` if there is one. Checks the transcripts
    against them.
    """
    from asr_am.lang.kaldi_lang import import_lang
    from asr_am.lang.lang_dir import Lang
    from asr_am.lang.prepare import prepare_lang
    from asr_am.lang.transcripts import check_transcripts

    if kaldi:
        import_lang(Path(kaldi), out)
    else:
        marks, silence_prob = options["position_dependent"], options["silence_prob"]
        prepare_lang(data_dir, out, position_dependent=marks, silence_prob=silence_prob)
    check_transcripts(data_dir, Lang.load(out), out, oov=options["oov"])


def language_model(data_dir: Path, lang_dir: Path, name: str, lm: dict, out: Path) -> None:
    """Writes an n-gram LM as G: estimated on a text of the corpus, or given as an ARPA file."""
    from asr_am.lang.prepare import prepare_lm

    prepare_lm(
        data_dir, lang_dir, out, name=name, order=lm.get("order"), arpa=lm.get("arpa"), text=lm.get("text", "train"),
        max_ngrams=lm.get("max_ngrams"), min_count=lm.get("min_count", 1),
        unknown=lm.get("unknown"),
    )  # fmt: skip


def check_options(cfg: DictConfig) -> None:
    """Raises InputError if an option of this stage is unknown, of another type or out of range."""
    build(LangOptions, values(cfg.corpus.lang), "corpus.lang")
    for name, lm in values(cfg.corpus.lms).items():
        build(NgramOptions, lm, f"corpus.lms.{name}")
        path = Path(lm.get("arpa") or "").expanduser()
        if path.is_absolute() and not path.is_file():
            raise InputError(f"corpus.lms.{name}.arpa={path}: no such file; give an ARPA file")


main = stage("lang", targets)

if __name__ == "__main__":
    main()
