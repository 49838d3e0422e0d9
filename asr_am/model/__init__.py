"""Acoustic models and their files."""
