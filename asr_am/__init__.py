"""Hybrid HMM acoustic models for speech recognition, trained with distributed SGD algorithms."""
