"""Scoring rules of minicts: a NIST GLM modelled on that of Hub5'00, written for this vocabulary."""

from __future__ import annotations

_HEADER = """\
;;
;; en.glm: what counts as the same word when minicts is scored.
;; Applied by csrfilt to reference and hypothesis alike.
;;
* name = "en.glm"
* desc = "English filtering rules of minicts, after the pattern of Hub5"
* format = 'NIST1'
* max_nrules = '1000'
* copy_no_hit = 'T'
* case_sensitive = 'F'
"""

# Includes words outside this vocabulary, which a recogniser with another one may output.
_HESITATIONS = ("UH", "UM", "EH", "MM", "HM", "AH", "HUH", "HA", "ER", "OOF", "HEE", "ACH", "EEE", "EW")
# without hyphens, because csrfilt would split at them afterwards
_SAME = {
    "UH-HUH": "UHHUH", "UM-HUM": "UHHUH", "UM-HM": "UHHUH", "MM-HM": "UHHUH", "MM-HUH": "UHHUH", "MHM": "UHHUH",
    "MMHM": "UHHUH", "UMHUM": "UHHUH", "OK": "OKAY", "O.K.": "OKAY", "ALRIGHT": "ALL RIGHT", "BYE-BYE": "BYE BYE",
    "YEP": "YEAH", "YUP": "YEAH",
}  # fmt: skip
_CONTRACTIONS = {
    "GONNA": ("GOING TO",), "WANNA": ("WANT TO",), "GOTTA": ("GOT TO",), "KINDA": ("KIND OF",), "SORTA": ("SORT OF",),
    "CAUSE": ("BECAUSE",), "'CAUSE": ("BECAUSE",), "CAN'T": ("CANNOT", "CAN NOT"), "WON'T": ("WILL NOT",),
    "LET'S": ("LET US",),
}  # fmt: skip
_NEGATED = ("IS", "ARE", "WAS", "WERE", "DO", "DOES", "DID", "HAVE", "HAS", "HAD", "COULD", "WOULD", "SHOULD")
_CLITICS = {
    "'M": (("I",), ("AM",)),
    "'RE": (("YOU", "WE", "THEY"), ("ARE",)),
    "'VE": (("I", "YOU", "WE", "THEY"), ("HAVE",)),
    "'LL": (("I", "YOU", "HE", "SHE", "IT", "WE", "THEY"), ("WILL",)),
    "'D": (("I", "YOU", "HE", "SHE", "IT", "WE", "THEY"), ("WOULD", "HAD")),
    "'S": (("HE", "SHE", "IT", "THAT", "THERE", "WHAT", "WHO", "WHERE", "HOW"), ("IS", "HAS")),
}


def contractions() -> dict[str, tuple[str, ...]]:
    """Maps each contraction to its possible expansions."""
    table = dict(_CONTRACTIONS)
    table.update({f"{verb}N'T": (f"{verb} NOT",) for verb in _NEGATED})
    for clitic, (hosts, verbs) in _CLITICS.items():
        table.update({host + clitic: tuple(f"{host} {verb}" for verb in verbs) for host in hosts})
    return table


def glm() -> str:
    """Returns the text of the file."""
    lines = [_HEADER, ";; hesitations"]
    lines += [_rule(word, "%HESITATION") for word in _HESITATIONS]
    lines += ["", ";; spellings of one word"]
    lines += [_rule(word, same) for word, same in _SAME.items()]
    lines += ["", ";; contractions: either form is right"]
    lines += [_rule(short, f"{{ {' / '.join((short, *long))} }}") for short, long in sorted(contractions().items())]
    return "\n".join(lines) + "\n"


def _rule(word: str, becomes: str) -> str:
    """Returns a rule for the complete word, with a blank on either side."""
    return f"[{word}] => [{becomes}] / [ ] __ [ ]"
