"""Decoding: graph, lattice-generating search, n-best lists, rescoring, CTM files."""
