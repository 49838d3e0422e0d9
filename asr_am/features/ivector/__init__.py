"""i-vectors: a universal background model, a total-variability model on its statistics, a point in it per speaker."""
