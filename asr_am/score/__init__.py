"""Scoring of CTM against STM and GLM files: word error counts and alignments, identical to those of NIST's sclite."""

from asr_am.score.scoring import Counts, Reference, Score, SegmentScore, score_files

__all__ = ["Counts", "Reference", "Score", "SegmentScore", "score_files"]
