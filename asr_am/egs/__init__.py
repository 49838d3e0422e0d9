"""Training examples: features with pdf targets on disk, and the loader that makes batches of them."""
