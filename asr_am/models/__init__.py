"""Acoustic models and language models, and their files."""
