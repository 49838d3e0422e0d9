"""Training examples: features with their pdf targets on disk, and the loader that cuts them into batches."""
