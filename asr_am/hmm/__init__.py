"""GMM-HMM training and Viterbi alignment: topology, decision tree, mixtures, fMLLR, and alignment graphs.

`align_corpus` runs these steps in order:

    frames          all features of a set in one file, read in ranges of utterances
    alignment_graphs, viterbi
                    one alignment graph per transcript (L, context, H, self-loops), and the search for its best path
    train_mono      flat start, then `training.train_mixtures` (realignment, `em`, mixture splitting) -> out/mono
    train_tri       `tree_build` (statistics, questions, tree), then `training.train_mixtures` -> out/tri
    train_lda_mllt  LDA of spliced MFCCs, then a tree and mixtures as above with MLLT updates -> out/lda_mllt
    train_sat       the same on fMLLR features, with new transforms before some passes -> out/sat

To add a system with its own features: put a `FrameStore` of them into the `TrainingContext`, start from the previous
system's alignments with `train_tri.init_system`, and pass `train_mixtures` a function that transforms frames and
Gaussians before some passes. `expectations` accumulates the statistics that MLLT and fMLLR share. `adaptation`
estimates fMLLR per speaker, from alignments here and from lattices in `decode.adapt`.
"""

REMEDY = "run stage 3 (align) again"  # for a missing or damaged file of this package
