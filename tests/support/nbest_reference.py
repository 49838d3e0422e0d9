"""An independent reference for the rescoring of lattices: all sentences of a lattice, each scored as a whole.

Shapes: C sentences of a lattice.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from asr_am.decode.hypotheses import nonspeech_words
from asr_am.decode.lattice import LmScale, read_lattices
from asr_am.decode.lm_mixture import LmMixture
from asr_am.decode.loading import load_lang
from asr_am.decode.nbest import nbest
from asr_am.decode.system import System
from asr_am.lang.mixture import mixed

MANY = 2000  # more sentences than any lattice of the tests has


def rescored_words(decoded: Path, subset: str, mixture: LmMixture, scale: LmScale) -> list[str]:
    """Returns the words of a set with the lowest costs under the mixture, sorted.

    The cost of a sentence is that of its cheapest path under the n-gram LM, with the mixture in the place of that LM.
    """
    lang = load_lang(System.load(decoded).lang_dir)
    dropped, found = nonspeech_words(lang), []
    for _, lattice in read_lattices(decoded / "lattices" / f"{subset}.ark"):
        group = nbest(lattice, scale, MANY)
        lstm, ngram = mixture.logprobs([[lang.word_names[word] for word in sentence.words] for sentence in group])
        both = mixed(lstm, ngram, mixture.weight)
        change_C = [float(q.sum() - p.sum()) for p, q in zip(both, ngram, strict=True)]
        cost_C = [
            sentence.graph + change + sentence.acoustic / scale.lm + scale.insertion * len(sentence.words)
            for sentence, change in zip(group, change_C, strict=True)
        ]
        found += [lang.word_names[word] for word in group[int(np.argmin(cost_C))].words if word not in dropped]
    return sorted(found)
