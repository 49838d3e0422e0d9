"""The exception for errors that a user can fix: a file, an option, a missing program."""

from __future__ import annotations


class InputError(Exception):
    """Invalid input. The message names the file (and line or utterance) or option, the problem and the remedy."""
