"""Hidden Markov models: topology, decision tree, Gaussian mixtures, alignment, and the graphs they are searched in.

The way of a corpus through the package, in the order of `align_corpus`:

    frames        all features of a set in one memory map
    graph, align  a graph per transcript (L, context, H, self-loops), searched for the best path
    train_mono    flat start -> `training.train_mixtures` (realign, `em`, split) -> out/mono
    train_tri     `tree_stats` -> `questions` -> `tree_build` -> `training.train_mixtures` -> out/tri

Another system (LDA+MLLT, SAT) is one more file like train_tri.py: it writes a `FrameStore` with its own features
(spliced and projected, or transformed per speaker) into the scratch folder, puts it into a `Workplace`, takes the
alignments of the system before it, and calls `train_mixtures` and `finish`. MLLT and fMLLR statistics come from the
same pass as EM's: posteriors of frames grouped by pdf (`em.accumulate`). What estimates the transform between passes
writes a new store and goes on.
"""
