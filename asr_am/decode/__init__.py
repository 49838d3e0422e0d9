"""From acoustic scores to words: decoding graph, search, lattices, n-best and CTM."""
