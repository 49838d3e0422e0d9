"""Scoring: STM, CTM and GLM in, word error counts and alignments out, equal to NIST's sclite to the last word."""

from asr_am.score.scoring import Counts, Reference, Score, SegmentScore, score_files

__all__ = ["Counts", "Reference", "Score", "SegmentScore", "score_files"]
