"""Distributed SGD: strategies, the flat parameters they work on, and the leases that hand out an epoch's batches.

Nothing in this package knows of speech.
"""
