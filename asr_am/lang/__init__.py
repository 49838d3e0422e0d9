"""Stage `lang`: the lexicon, n-gram language models, and the transducers L and G made from them."""
