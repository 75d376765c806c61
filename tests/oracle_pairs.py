"""Losses of two towers, of given pairs and of clusters, and the options of the query losses: loops in float64.

As in :mod:`oracle`, nothing of the package, nor of JAX, is imported. What the package holds fixed in a derivative (the
similarities that ``hardness`` and ``margin`` look at) comes from ``frozen``: arguments by name, as they were before
anything moved.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from oracle import (
    Similarity,
    _filled,
    cosine_similarity,
    dot_product,
    log1p_cosine_similarity,
    log_sum,
    negative_euclidean_distance,
    pair_loss,
    reduce_terms,
)

__all__ = [
    "clip_loss",
    "cluster_loss",
    "cosine_similarity",
    "dot_product",
    "info_nce_loss",
    "log1p_cosine_similarity",
    "multiple_negatives_ranking_loss",
    "negative_euclidean_distance",
    "ntxent_pairs",
    "ntxent_views",
    "siglip_loss",
]


def choice(
    positive: float, negatives: Sequence[float], temperature: float = 1.0, smoothing: float = 0.0, prior: float = 0.0
) -> float:
    """The loss of one query, from its logits."""
    if prior:
        number = len(negatives)
        if number == 0:
            return 0.0
        together = log_sum(negatives)
        share = math.log(number * prior) + positive - together
        rest = together - math.log1p(-prior) + math.log1p(-math.exp(share)) if share < 0 else -math.inf
        return pair_loss(positive, [max(rest, math.log(number) - 1 / temperature)])
    loss = pair_loss(positive, negatives)
    if smoothing:
        logits = [positive, *negatives]
        all_targets = [pair_loss(logit, logits[:i] + logits[i + 1 :]) for i, logit in enumerate(logits)]
        loss = (1 - smoothing) * loss + smoothing / len(logits) * sum(all_targets)
    return loss


def clip_loss(
    images,
    texts,
    temperature=0.07,
    *,
    ids=None,
    label_smoothing=0.0,
    where=None,
    weights=None,
    reduction="mean",
    similarity: Similarity = cosine_similarity,
):
    images, texts = np.asarray(images, np.float64), np.asarray(texts, np.float64)
    n = len(images)
    temperature, real = _filled(temperature, (n,), None), _filled(where, (n,), True)
    terms = []
    for i in range(n):
        if not real[i]:
            terms.append([])
            continue
        others = [j for j in range(n) if j != i and real[j] and not (ids is not None and ids[i] == ids[j])]
        positive = similarity(images[i], texts[i]) / temperature[i]
        to_texts = [similarity(images[i], texts[j]) / temperature[i] for j in others]
        to_images = [similarity(images[j], texts[i]) / temperature[i] for j in others]
        both = [choice(positive, logits, smoothing=label_smoothing) for logits in (to_texts, to_images)]
        terms.append([sum(both) / 2])
    return reduce_terms(terms, _filled(weights, (n,), 1.0), reduction)


def siglip_loss(
    images,
    texts,
    temperature=0.1,
    bias=-10.0,
    *,
    ids=None,
    where=None,
    weights=None,
    reduction="mean",
    similarity: Similarity = cosine_similarity,
):
    images, texts = np.asarray(images, np.float64), np.asarray(texts, np.float64)
    n = len(images)
    real = _filled(where, (n,), True)
    terms = []
    for i in range(n):
        row = []
        for j in range(n):
            if not (real[i] and real[j]) or (i != j and ids is not None and ids[i] == ids[j]):
                continue
            logit = similarity(images[i], texts[j]) / temperature + bias
            row.append(np.logaddexp(0, -logit if i == j else logit))
        terms.append([sum(row)] if row else [])
    return reduce_terms(terms, _filled(weights, (n,), 1.0), reduction)


def ntxent_pairs(
    embeddings,
    positives,
    negatives,
    *,
    temperature=0.07,
    candidates=None,
    reduction="mean",
    similarity: Similarity = cosine_similarity,
):
    embeddings = np.asarray(embeddings, np.float64)
    others = embeddings if candidates is None else np.asarray(candidates, np.float64)
    n = len(embeddings)
    temperature = _filled(temperature, (n,), None)
    terms: list[list[float]] = [[] for _ in range(n)]
    for a, p in positives:
        if -1 in (a, p):
            continue
        rivals = [c for b, c in negatives if b == a and -1 not in (b, c)]
        logits = [similarity(embeddings[a], others[c]) / temperature[a] for c in (p, *rivals)]
        terms[a].append(pair_loss(logits[0], logits[1:]))
    return reduce_terms(terms, np.ones(n), reduction)


def cluster_loss(assignments_a, assignments_b, temperature=1.0, *, where=None):
    """Contrastive-Clustering's ClusterLoss: columns are the items."""
    views = [np.asarray(x, np.float64) for x in (assignments_a, assignments_b)]
    real = _filled(where, (len(views[0]),), True)
    views = [view[real] for view in views]
    total = 0.0
    for view in views:
        share = view.sum(0) / view.sum()
        total += math.log(len(share)) + sum(p * math.log(p) for p in share if p != 0)
    k = views[0].shape[1]
    columns = np.concatenate([view.T for view in views])
    for i in range(2 * k):
        partner = (i + k) % (2 * k)
        logits = {c: cosine_similarity(columns[i], columns[c]) / temperature for c in range(2 * k) if c != i}
        total += pair_loss(logits.pop(partner), list(logits.values())) / (2 * k)
    return total


def info_nce_loss(
    queries,
    keys,
    negatives=None,
    *,
    temperature=0.07,
    in_batch=True,
    ids=None,
    key_ids=None,
    pair_where=None,
    key_where=None,
    negative_where=None,
    key_bias=None,
    label_smoothing=0.0,
    hardness=0.0,
    class_prior=0.0,
    margin=None,
    relative_margin=False,
    guide_queries=None,
    guide_keys=None,
    where=None,
    weights=None,
    reduction="mean",
    similarity: Similarity = cosine_similarity,
    frozen: Mapping[str, Any] | None = None,
):
    queries, keys = np.asarray(queries, np.float64), np.asarray(keys, np.float64)
    n, m = len(queries), len(keys)
    fixed = {"queries": queries, "keys": keys, "negatives": negatives, **(frozen or {})}

    def own_of(rows):
        rows = np.zeros((0, *keys.shape[1:])) if rows is None else np.asarray(rows, np.float64)
        return rows if rows.ndim > keys.ndim else np.broadcast_to(rows, (n, *rows.shape))

    own, fixed_own = own_of(negatives), own_of(fixed["negatives"])
    negative_real = _filled(negative_where, own.shape[:2], True)
    temperature, real = _filled(temperature, (n,), None), _filled(where, (n,), True)
    key_real = _filled(key_where, (m,), True) & np.concatenate([real, np.ones(m - n, bool)])
    allowed, bias = _filled(pair_where, (n, m), True), _filled(key_bias, (m,), 0.0)
    key_ids = ids if key_ids is None else key_ids

    def is_negative(i, j):
        same_thing = ids is not None and ids[i] == key_ids[j]
        return in_batch and j != i and key_real[j] and allowed[i, j] and not same_thing

    def guide(i, j):
        if guide_queries is not None:
            return similarity(guide_queries[i], guide_keys[j])
        return similarity(fixed["queries"][i], fixed["keys"][j])

    def limit(i):
        right = guide(i, i)
        return right - (abs(right) * margin if relative_margin else margin)

    terms = []
    for i in range(n):
        if not (real[i] and key_real[i]):
            terms.append([])
            continue
        t, logits = temperature[i], []
        for j in range(m):
            if is_negative(i, j) and not (margin is not None and guide(i, j) > limit(i)):
                harder = hardness * similarity(fixed["queries"][i], fixed["keys"][j]) if hardness else 0.0
                logits.append(similarity(queries[i], keys[j]) / t + bias[j] + harder)
        for j in np.flatnonzero(negative_real[i]):
            now = similarity(fixed["queries"][i], fixed_own[i, j])
            if margin is None or guide_queries is not None or not now > limit(i):
                logits.append(similarity(queries[i], own[i, j]) / t + (hardness * now if hardness else 0.0))
        positive = similarity(queries[i], keys[i]) / t + bias[i]
        terms.append([choice(positive, logits, t, label_smoothing, class_prior)])
    return reduce_terms(terms, _filled(weights, (n,), 1.0), reduction)


def multiple_negatives_ranking_loss(
    anchors,
    positives,
    negatives=None,
    *,
    temperature=0.05,
    symmetric=False,
    negative_where=None,
    key_bias=None,
    guide_queries=None,
    guide_keys=None,
    where=None,
    frozen: Mapping[str, Any] | None = None,
    **options,
):
    """Every anchor chooses among all positives and all negatives; a positive among the anchors alone."""
    frozen = {"anchors": anchors, "positives": positives, "negatives": negatives, **(frozen or {})}
    fixed_negatives = frozen["negatives"]
    if negatives is not None and np.ndim(negatives) > np.ndim(anchors):
        n, k = np.shape(negatives)[:2]
        negative_where = (_filled(negative_where, (n, k), True) & _filled(where, (n,), True)[:, None]).reshape(n * k)
        negatives, fixed_negatives = (np.reshape(x, (n * k, *np.shape(x)[2:])) for x in (negatives, fixed_negatives))
    options = {**options, "temperature": temperature, "where": where}
    there = info_nce_loss(
        anchors,
        positives,
        negatives,
        negative_where=negative_where,
        key_bias=key_bias,
        guide_queries=guide_queries,
        guide_keys=guide_keys,
        frozen={"queries": frozen["anchors"], "keys": frozen["positives"], "negatives": fixed_negatives},
        **options,
    )
    if not symmetric:
        return there
    back = info_nce_loss(
        positives,
        anchors,
        guide_queries=guide_keys,
        guide_keys=guide_queries,
        frozen={"queries": frozen["positives"], "keys": frozen["anchors"], "negatives": None},
        **options,
    )
    return (there + back) / 2


def ntxent_views(view_a, view_b, temperature=0.07, **options):
    """Two views in the form of queries and keys: ids keep a row, and its other view, from being negatives."""
    a, b = np.asarray(view_a), np.asarray(view_b)
    ids = np.tile(np.arange(len(a)), 2)
    return info_nce_loss(np.concatenate([a, b]), np.concatenate([b, a]), ids=ids, temperature=temperature, **options)
