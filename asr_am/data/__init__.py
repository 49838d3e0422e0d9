"""Corpora as lhotse manifests: reading, writing, checks, STM references, downloads."""
