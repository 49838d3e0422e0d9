"""Stage lang: lexicon, n-gram language models, and the transducers L and G."""
