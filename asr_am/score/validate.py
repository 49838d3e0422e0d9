"""hubscr's validators: which words a filtered English STM or CTM may hold (stmValidator.pl, ctmValidator.pl).

They guard an evaluation against tokens that the rules forgot; the score does not depend on them, so they only advise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from asr_am.score.files import Segment, Slot, show

_LETTERS = rb"([a-z]*-)*[a-z]+"
_STM_WORD = re.compile(
    b"|".join((
        rb"ignore_time_segment_in_scoring",
        _LETTERS,
        rb"\(" + _LETTERS + rb"\)",
        rb"[a-z]+\.('s|s)*",
        rb"\([a-z]+\.('s|s)*\)",
        rb"[a-z]+-",
        rb"\([a-z]+-\)",
        _LETTERS + rb"('(d|s|t|re|ll|m|ve|))*",
        rb"\(" + _LETTERS + rb"('(d|s|t|re|ll|m|ve|))\)*",
        rb"o'\S+|d'etre",
        rb"\(%(hesitation|bcack|bcnack)\)",
        rb"%(hesitation|bcack|bcnack)",
        rb"[{}/@]",
    ))
)  # fmt: skip
_CTM_WORD = re.compile(rb"[a-z'-]+|[a-z]\..*|.*@.*|.*%(bcn?ack|hesitation).*")


def unexpected_words(segments: Iterable[Segment], slots: Iterable[Slot]) -> Iterator[str]:
    """The words that NIST's validators would refuse, each as "path:line: word"."""
    for segment in segments:
        for token in segment.text.split():
            if not _STM_WORD.fullmatch(token):
                yield f"{segment.where}: {show(token)}"
    for slot in slots:
        for word in (word for branch in slot.branches for word in branch):
            if not _CTM_WORD.fullmatch(word):
                yield f"{slot.where}: {show(word)}"
