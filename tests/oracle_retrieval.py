"""Retrieval, alignment and uniformity as loops in float64, straight from their definitions.

Nothing of the package, nor of JAX, is imported here. Rows that do not take part are never looked at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from oracle import cosine_similarity, unit


def ranked(scores: Sequence[float], right: Sequence[bool]) -> list[bool]:
    """Whether each place of the list of keys, best first, holds a right key.

    Of equal scores the wrong key comes first; a wrong key of NaN before all others, a right key of NaN after them.
    """

    def order(j: int) -> tuple[float, bool]:
        score = scores[j]
        if math.isnan(score):
            return (math.inf, True) if right[j] else (-math.inf, False)
        return -score, right[j]

    return [right[j] for j in sorted(range(len(scores)), key=order)]


def candidates_of(i: int, n: int, m: int | None, options: dict[str, Any]) -> list[tuple[int, bool]]:
    """The keys of query ``i`` that take part, and whether they are right."""
    labels, ids = options.get("labels"), options.get("ids")
    own = m is None
    key_labels = labels if own else options.get("key_labels")
    key_ids = ids if own else options.get("key_ids", ids)
    key_where = options.get("where") if own or labels is None else None
    found = []
    for j in range(n if m is None else m):
        if key_where is not None and j < n and not key_where[j]:
            continue
        if options.get("key_where") is not None and not options["key_where"][j]:
            continue
        if own and i == j:
            continue
        right = i == j if labels is None else labels[i] == key_labels[j]
        same = ids is not None and ids[i] == key_ids[j]
        if same and not (labels is None and right):
            continue
        found.append((j, bool(right)))
    return found


def query_metrics(holds_right: list[bool], ks: Sequence[int], labelled: bool) -> dict[str, float]:
    rank, number = holds_right.index(True) + 1, sum(holds_right)
    result: dict[str, float] = {f"recall@{k}": float(any(holds_right[:k])) for k in ks}
    result |= {"mrr": 1 / rank, "median_rank": rank}
    if labelled:
        result |= {f"precision@{k}": sum(holds_right[:k]) / k for k in ks}
        result["r_precision"] = sum(holds_right[:number]) / number
        precisions = [sum(holds_right[: i + 1]) / (i + 1) for i in range(number) if holds_right[i]]
        result["map@r"] = sum(precisions) / number
    return result


def retrieval_metrics(
    queries: Any,
    keys: Any = None,
    *,
    ks: Sequence[int] = (1, 5, 10),
    similarity: Any = cosine_similarity,
    **options: Any,
) -> dict[str, float]:
    queries = np.asarray(queries, np.float64)
    rows = queries if keys is None else np.asarray(keys, np.float64)
    each = []
    for i in range(len(queries)):
        if options.get("where") is not None and not options["where"][i]:
            continue
        candidates = candidates_of(i, len(queries), None if keys is None else len(rows), options)
        if any(right for _, right in candidates):
            scores = [similarity(queries[i], rows[j]) for j, _ in candidates]
            holds_right = ranked(scores, [right for _, right in candidates])
            each.append(query_metrics(holds_right, ks, options.get("labels") is not None))
    if not each:
        names = query_metrics([True], ks, options.get("labels") is not None)
        return dict.fromkeys(names, math.nan)
    means = {name: float(np.mean([metrics[name] for metrics in each])) for name in each[0]}
    return means | {"median_rank": float(np.median([metrics["median_rank"] for metrics in each]))}


def top_k(queries: Any, keys: Any, k: int, key_where: Any = None) -> tuple[np.ndarray, np.ndarray]:
    scores, indices = np.full((len(queries), k), -np.inf), np.full((len(queries), k), -1)
    for i, query in enumerate(queries):
        real = [j for j in range(len(keys)) if key_where is None or key_where[j]]
        best = sorted(real, key=lambda j: (-cosine_similarity(query, keys[j]), j))[:k]
        for place, j in enumerate(best):
            scores[i, place], indices[i, place] = cosine_similarity(query, keys[j]), j
    return scores, indices


def alignment(view_a: Any, view_b: Any, exponent: float = 2, where: Any = None) -> float:
    real = [i for i in range(len(view_a)) if where is None or where[i]]
    distances = [math.dist(unit(np.asarray(view_a[i], float)), unit(np.asarray(view_b[i], float))) for i in real]
    return sum(distance**exponent for distance in distances) / len(real) if real else 0.0


def uniformity(embeddings: Any, t: float = 2, where: Any = None) -> float:
    rows = [unit(np.asarray(x, float)) for i, x in enumerate(embeddings) if where is None or where[i]]
    exponents = [-t * math.dist(rows[i], rows[j]) ** 2 for j in range(len(rows)) for i in range(j)]
    if not exponents:
        return 0.0
    largest = max(exponents)
    return largest + math.log(sum(math.exp(e - largest) for e in exponents) / len(exponents))
