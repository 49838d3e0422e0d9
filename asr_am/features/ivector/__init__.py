"""i-vectors: a universal background model (UBM), a total-variability model of its statistics, and extraction."""
