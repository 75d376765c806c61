"""Losses of two towers, of given pairs and of clusters: loops in float64.

As in :mod:`oracle`, nothing of the package, nor of JAX, is imported. The query losses come from there, so that this
module has all losses that :mod:`against_oracle` asks for.
"""

import math

import numpy as np
from oracle import (
    Similarity,
    choice,
    cosine_similarity,
    dot_product,
    filled,
    info_nce_loss,
    log1p_cosine_similarity,
    multiple_negatives_ranking_loss,
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
    temperature, real = filled(temperature, (n,), None), filled(where, (n,), True)
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
    return reduce_terms(terms, weights, reduction)


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
    real = filled(where, (n,), True)
    terms = []
    for i in range(n):
        row = []
        for j in range(n):
            if not (real[i] and real[j]) or (i != j and ids is not None and ids[i] == ids[j]):
                continue
            logit = similarity(images[i], texts[j]) / temperature + bias
            row.append(np.logaddexp(0, -logit if i == j else logit))
        terms.append([sum(row)] if row else [])
    return reduce_terms(terms, weights, reduction)


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
    temperature = filled(temperature, (n,), None)
    terms: list[list[float]] = [[] for _ in range(n)]
    for a, p in positives:
        if -1 in (a, p):
            continue
        rivals = [c for b, c in negatives if b == a and -1 not in (b, c)]
        logits = [similarity(embeddings[a], others[c]) / temperature[a] for c in (p, *rivals)]
        terms[a].append(pair_loss(logits[0], logits[1:]))
    return reduce_terms(terms, None, reduction)


def cluster_loss(assignments_a, assignments_b, temperature=1.0, *, where=None):
    """Contrastive-Clustering's ClusterLoss: columns are the items."""
    views = [np.asarray(x, np.float64) for x in (assignments_a, assignments_b)]
    real = filled(where, (len(views[0]),), True)
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


def ntxent_views(view_a, view_b, temperature=0.07, **options):
    """Two views in the form of queries and keys: ids keep a row, and its other view, from being negatives."""
    a, b = np.asarray(view_a), np.asarray(view_b)
    ids = np.tile(np.arange(len(a)), 2)
    return info_nce_loss(np.concatenate([a, b]), np.concatenate([b, a]), ids=ids, temperature=temperature, **options)
