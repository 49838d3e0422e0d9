"""Corpora as lhotse manifests: writing, reading, checking; STM references; downloads."""
