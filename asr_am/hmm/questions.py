"""Questions for the decision tree: sets of phones that sound alike, found from the data.

Shapes: M distinct (window, state), F columns of the tree statistics.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from asr_am.hmm.tree_stats import TreeStats, log_likelihood

CENTRAL_STATE = 1  # of three, the one least coloured by its neighbours


def phone_questions(
    stats: TreeStats, roots: Sequence[Sequence[int]], silence: Collection[int], extra: Iterable[Collection[int]] = ()
) -> list[frozenset[int]]:
    """Every cluster of a clustering of the nonsilence roots; silence, with and without the utterance's edge; `extra`.

    The clusters are merged by least loss of likelihood of the central states, as in Kaldi's cluster-phones. Single
    roots are questions too. Questions are distinct, none is empty, and their order does not depend on hashing.
    """
    units = [frozenset(root) for root in roots if not set(root) <= set(silence)]
    phone_M = stats.windows_M3[:, 1]
    spoken_M = ~np.isin(phone_M, sorted(silence))
    central = min(CENTRAL_STATE, int(stats.state_M[spoken_M].max(initial=0)))  # phones may have a single state
    central_MF = stats.sums_MF * (stats.state_M == central)[:, None]
    sums = [central_MF[np.isin(phone_M, sorted(unit))].sum(axis=0) for unit in units]
    silences = [frozenset(silence), frozenset(silence) | {0}, *(frozenset({phone}) for phone in silence)]
    found = [*_clusters(units, sums), *silences, *(frozenset(phones) for phones in extra)]
    return [phones for phones in dict.fromkeys(found) if phones]


def _clusters(units: list[frozenset[int]], sums: list[np.ndarray]) -> list[frozenset[int]]:
    """All sets met while merging the two clusters with the least loss until one is left."""
    found = list(units)
    clusters, sums = list(units), list(sums)
    while len(clusters) > 1:
        sums_XF = np.array(sums)
        own_X = log_likelihood(sums_XF)
        pairs = np.triu_indices(len(clusters), k=1)
        loss = own_X[pairs[0]] + own_X[pairs[1]] - log_likelihood(sums_XF[pairs[0]] + sums_XF[pairs[1]])
        best = int(np.argmin(loss))
        first, second = int(pairs[0][best]), int(pairs[1][best])
        clusters.append(clusters[first] | clusters[second])
        sums.append(sums[first] + sums[second])
        found.append(clusters[-1])
        for index in (second, first):
            del clusters[index], sums[index]
    return found
