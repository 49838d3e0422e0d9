"""Acoustic features and their archives: log-mel and MFCC with Kaldi's values, CMVN, deltas, LDA, fMLLR, i-vectors."""
