"""The one exception for what a user can mend: a file, an option, a missing program."""

from __future__ import annotations


class InputError(Exception):
    """Bad input. The message names the file (and line or utterance), what is wrong, and the remedy."""
