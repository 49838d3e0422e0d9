"""Distributed SGD: strategies, the flat parameters they update, and the leases that hand out an epoch's batches.

Nothing in this package depends on speech. README.md in this folder explains how the parts fit together.
"""
