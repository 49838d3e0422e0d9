"""Log-mel and MFCC features with Kaldi's numbers, CMVN, deltas, and the archives they live in."""
