"""Hybrid HMM acoustic models for speech recognition, trained with distributed SGD algorithms."""

import locale
import os
import sys

if sys.argv[:1] == ["-m"] and not sys.flags.utf8_mode and locale.getencoding().lower() not in ("utf-8", "utf8"):
    # `python -m asr_am...` under a locale such as de_DE or POSIX: libraries would read and write files in its encoding.
    os.environ["PYTHONUTF8"] = "1"  # for child processes
    os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
