"""Hidden Markov models: topology, decision tree, Gaussian mixtures, alignment, and the graphs they are searched in.

The way of a corpus through the package, in the order of `align_corpus`:

    frames          all features of a set in one memory map
    graph, align    a graph per transcript (L, context, H, self-loops), searched for the best path
    train_mono      flat start -> `training.train_mixtures` (realign, `em`, split) -> out/mono
    train_tri       `tree_stats` -> `questions` -> `tree_build` -> `training.train_mixtures` -> out/tri
    train_lda_mllt  `lda` of spliced MFCCs -> a tree and mixtures as above, with updates of `mllt` -> out/lda_mllt
    train_sat       the same on features that `fmllr` adapts to each speaker, anew before some passes -> out/sat

A system with features of its own puts a `FrameStore` of them into the `TrainingContext`, begins with `train_tri.grow` from
the alignments of the system before it, and hands `train_mixtures` a function that transforms frames and Gaussians
before some passes. Statistics of transforms are matrix products (`outer`) of frames with what the Gaussians expect of
each (`expected`); `adaptation` takes them speaker by speaker, from alignments here and from lattices in `decode.adapt`.
"""

REMEDY = "run stage 3 (align) again"  # where a file of this package is damaged
