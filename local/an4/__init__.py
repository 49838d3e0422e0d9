"""Preparation of CMU AN4 (census): real read speech, 16 kHz, close-talking microphone."""
