"""Training of acoustic models: the loop, learning-rate schedules, checkpoints, metrics."""
