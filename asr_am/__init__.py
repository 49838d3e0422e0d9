"""Hybrid HMM acoustic models trained under many distributed SGD algorithms."""
