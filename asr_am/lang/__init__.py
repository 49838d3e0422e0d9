"""Stage `lang`: the lexicon, n-gram language models, and the transducers L and G made from them."""

from __future__ import annotations

from asr_am.lang.lang import Lang
from asr_am.lang.prepare import prepare_lang, prepare_lm
from asr_am.lang.transcripts import check_transcripts

__all__ = ["Lang", "check_transcripts", "prepare_lang", "prepare_lm"]
