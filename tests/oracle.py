"""The losses as loops in float64, straight from their definitions.

Nothing of the package, nor of JAX, is imported here. A similarity is a function of two rows, and it is
called only for pairs that exist, so hidden rows may hold anything. Slow and plain on purpose.

What the package holds fixed in a derivative (the similarities that ``hardness`` and ``margin`` look at) comes from
``frozen``: arguments by name, as they were before anything moved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Similarity = Callable[[np.ndarray, np.ndarray], float]


# Similarities of two rows -------------------------------------------------------------------------------------------


def unit(x: np.ndarray) -> np.ndarray:
    """The row at length 1; a row of zeros stays one."""
    largest = np.max(np.abs(x))
    if largest == 0:
        return x * 0.0
    x = x / largest
    return x / math.sqrt(np.dot(x, x))


def cosine_similarity(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.dot(unit(x), unit(y)))


def dot_product(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.dot(x, y))


def negative_euclidean_distance(x: np.ndarray, y: np.ndarray) -> float:
    return -math.sqrt(np.dot(x - y, x - y))


def log1p_cosine_similarity(x: np.ndarray, y: np.ndarray) -> float:
    cosine = cosine_similarity(x, y)
    return math.log1p(cosine) if cosine > -1 else -math.inf


# The formulas of one anchor -----------------------------------------------------------------------------------------


def log_sum(logits: Sequence[float]) -> float:
    """``log(sum(exp(logits)))``, -inf of nothing."""
    largest = max(logits, default=-math.inf)
    if largest == -math.inf:
        return -math.inf
    return largest + math.log(sum(np.exp(np.asarray(logits) - largest)))


def softplus_of_sum(differences: Sequence[float]) -> float:
    """``log(1 + sum(exp(differences)))``, exact where the sum is far below 1 and where it would overflow."""
    largest = max(differences, default=-math.inf)
    if largest == -math.inf:
        return 0.0
    if largest <= 0:
        return math.log1p(np.sum(np.exp(np.asarray(differences))))
    return largest + math.log(math.exp(-largest) + np.sum(np.exp(np.asarray(differences) - largest)))


def pair_loss(positive: float, others: Sequence[float]) -> float:
    """``-log(exp(positive) / (exp(positive) + sum(exp(others))))``."""
    return softplus_of_sum([other - positive for other in others])


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


def anchor_terms(positives: list[float], negatives: list[float], formula: str) -> list[float]:
    """The loss terms of one anchor: one per positive, a single one for ``"in"``, none if the anchor does not count."""
    if not positives or (formula == "negatives" and not negatives):
        return []
    if formula == "pair":
        return [pair_loss(p, negatives) for p in positives]
    if formula == "all":
        return [pair_loss(p, positives[:i] + positives[i + 1 :] + negatives) for i, p in enumerate(positives)]
    if formula == "negatives":
        return [log_sum(negatives) - p for p in positives]
    assert formula == "in"
    together = log_sum(positives)
    return [math.log(len(positives)) + softplus_of_sum([n - together for n in negatives])]


def reduce_terms(terms: list[list[float]], weights: Any, reduction: str) -> float | np.ndarray:
    """The terms of all anchors as one number, or as one for each anchor."""
    weights = filled(weights, (len(terms),), 1.0)
    if reduction == "none":
        return np.array([w * sum(t) / len(t) if t and w else 0.0 for t, w in zip(terms, weights, strict=True)])
    counted = [(t, float(w)) for t, w in zip(terms, weights, strict=True) if t and w]
    if reduction == "sum":
        return sum(w * sum(t) for t, w in counted)
    if reduction == "mean":
        numerator = sum(w * sum(t) for t, w in counted)
        total = sum(w * len(t) for t, w in counted)
    else:
        assert reduction == "anchor_mean"
        numerator = sum(w * sum(t) / len(t) for t, w in counted)
        total = sum(w for _, w in counted)
    return numerator / total if total else 0.0


# Arguments ----------------------------------------------------------------------------------------------------------


def filled(value: Any, shape: tuple[int, ...], default: Any) -> np.ndarray:
    """An optional argument at full shape; a scalar, or one of shape (1,), holds everywhere."""
    return np.broadcast_to(np.asarray(default if value is None else value), shape)


class Pairs(NamedTuple):
    """Which candidates belong to each anchor, and which do not: both ``[n, m]``."""

    positive: np.ndarray
    negative: np.ndarray


def pair_masks(
    labels: Any, candidate_labels: Any = None, *, where=None, candidate_where=None, ids=None, candidate_ids=None
) -> Pairs:
    labels = np.asarray(labels)
    among_themselves = candidate_labels is None
    others = labels if among_themselves else np.asarray(candidate_labels)
    if among_themselves:
        candidate_ids, candidate_where = ids, where
    n, m = len(labels), len(others)
    real, candidate_real = filled(where, (n,), True), filled(candidate_where, (m,), True)
    positive, negative = np.zeros((n, m), bool), np.zeros((n, m), bool)
    for a in range(n):
        for c in range(m):
            same_thing = (among_themselves and a == c) or (ids is not None and ids[a] == candidate_ids[c])
            if real[a] and candidate_real[c] and not same_thing:
                (positive if labels[a] == others[c] else negative)[a, c] = True
    return Pairs(positive, negative)


# Losses -------------------------------------------------------------------------------------------------------------


def _label_loss(
    embeddings,
    labels,
    temperature,
    *,
    formula: str,
    candidates=None,
    candidate_labels=None,
    candidate_where=None,
    ids=None,
    candidate_ids=None,
    where=None,
    weights=None,
    reduction: str,
    similarity: Similarity,
):
    embeddings = np.asarray(embeddings, np.float64)
    if embeddings.ndim == 3:
        n, views, d = embeddings.shape
        per_row = {"temperature": temperature, "where": where, "weights": weights}
        rows = {k: None if v is None else np.repeat(filled(v, (n,), v), views) for k, v in per_row.items()}
        result = _label_loss(
            embeddings.reshape(n * views, d),
            np.repeat(labels, views),
            formula=formula,
            candidates=candidates,
            candidate_labels=candidate_labels,
            candidate_where=candidate_where,
            reduction=reduction,
            similarity=similarity,
            **rows,
        )
        return result.reshape(n, views).mean(1) if reduction == "none" else result
    others = embeddings if candidates is None else np.asarray(candidates, np.float64)
    n = len(embeddings)
    pairs = pair_masks(
        labels, candidate_labels, where=where, candidate_where=candidate_where, ids=ids, candidate_ids=candidate_ids
    )
    temperature = filled(temperature, (n,), None)
    terms = []
    for a in range(n):
        positives = [similarity(embeddings[a], others[c]) / temperature[a] for c in np.flatnonzero(pairs.positive[a])]
        negatives = [similarity(embeddings[a], others[c]) / temperature[a] for c in np.flatnonzero(pairs.negative[a])]
        terms.append(anchor_terms(positives, negatives, formula))
    return reduce_terms(terms, weights, reduction)


def ntxent(
    embeddings,
    labels,
    temperature=0.07,
    *,
    denominator="pair",
    reduction="mean",
    similarity=cosine_similarity,
    **options,
):
    return _label_loss(
        embeddings, labels, temperature, formula=denominator, reduction=reduction, similarity=similarity, **options
    )


def supcon_loss(
    embeddings,
    labels,
    temperature=0.1,
    *,
    form="out",
    reduction="anchor_mean",
    similarity=cosine_similarity,
    **options,
):
    formula = {"out": "all", "in": "in"}[form]
    return _label_loss(
        embeddings, labels, temperature, formula=formula, reduction=reduction, similarity=similarity, **options
    )


def ntxent_views(
    *views,
    temperature=0.07,
    denominator="pair",
    where=None,
    weights=None,
    reduction="mean",
    similarity=cosine_similarity,
):
    n, count = len(views[0]), len(views)
    per_item = {"temperature": temperature, "where": where, "weights": weights}
    per_row = {k: None if v is None else np.tile(filled(v, (n,), v), count) for k, v in per_item.items()}
    result = ntxent(
        np.concatenate([np.asarray(view, np.float64) for view in views]),
        np.tile(np.arange(n), count),
        denominator=denominator,
        reduction=reduction,
        similarity=similarity,
        **per_row,
    )
    return result.reshape(count, n).mean(0) if reduction == "none" else result


def instance_loss(view_a, view_b, temperature=0.5, *, similarity=dot_product, **options):
    return ntxent_views(view_a, view_b, temperature=temperature, similarity=similarity, **options)


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
    negative_real = filled(negative_where, own.shape[:2], True)
    temperature, real = filled(temperature, (n,), None), filled(where, (n,), True)
    key_real = filled(key_where, (m,), True) & np.concatenate([real, np.ones(m - n, bool)])
    allowed, bias = filled(pair_where, (n, m), True), filled(key_bias, (m,), 0.0)
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
            judged = margin is not None and guide_queries is None
            now = similarity(fixed["queries"][i], fixed_own[i, j]) if judged or hardness else 0.0
            if not (judged and now > limit(i)):
                logits.append(similarity(queries[i], own[i, j]) / t + hardness * now)
        positive = similarity(queries[i], keys[i]) / t + bias[i]
        terms.append([choice(positive, logits, t, label_smoothing, class_prior)])
    return reduce_terms(terms, weights, reduction)


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
        negative_where = (filled(negative_where, (n, k), True) & filled(where, (n,), True)[:, None]).reshape(n * k)
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
    similarity = options.pop("similarity", cosine_similarity)
    back = info_nce_loss(
        positives,
        anchors,
        guide_queries=guide_keys,
        guide_keys=guide_queries,
        frozen={"queries": frozen["positives"], "keys": frozen["anchors"], "negatives": None},
        similarity=lambda x, y: similarity(y, x),
        **options,
    )
    return (there + back) / 2


def loss_floor(num_negatives, temperature, *, num_positives=1, lowest_similarity=-1.0) -> float:
    rest = (num_positives - 1) + num_negatives * math.exp((lowest_similarity - 1) / temperature)
    return math.log1p(rest)


# Statistics ---------------------------------------------------------------------------------------------------------


class Statistics(NamedTuple):
    anchors: int
    positive_pairs: int
    negative_pairs: int
    positive_similarity: float
    negative_similarity: float
    hardest_negative_similarity: float
    accuracy: float
    chance_loss: float


def batch_statistics(
    embeddings, labels, *, candidates=None, candidate_labels=None, similarity=cosine_similarity, **options
) -> Statistics:
    """Pairs are counted over the whole batch; means over nothing are NaN; accuracy over anchors with a positive."""
    embeddings = np.asarray(embeddings, np.float64)
    others = embeddings if candidates is None else np.asarray(candidates, np.float64)
    pairs = pair_masks(labels, candidate_labels, **options)
    positives, negatives, hardest, right, chance = [], [], [], [], []
    for a in range(len(embeddings)):
        to_positive = [similarity(embeddings[a], others[c]) for c in np.flatnonzero(pairs.positive[a])]
        to_negative = [similarity(embeddings[a], others[c]) for c in np.flatnonzero(pairs.negative[a])]
        positives += to_positive
        negatives += to_negative
        if to_negative:
            hardest.append(max(to_negative))
        if to_positive:
            right.append(max(to_positive) > max(to_negative, default=-math.inf))
            chance += [math.log(1 + len(to_negative))] * len(to_positive)
    mean = lambda values: float(np.mean(values)) if values else math.nan  # noqa: E731
    return Statistics(
        len(right),
        len(positives),
        len(negatives),
        mean(positives),
        mean(negatives),
        mean(hardest),
        mean(right),
        mean(chance),
    )


# Derivatives --------------------------------------------------------------------------------------------------------

# Central differences of order 8: truncation is of order step**8, rounding of order 1e-16 / step.
_STENCIL = ((1, 4 / 5), (2, -1 / 5), (3, 4 / 105), (4, -1 / 280))


def gradient(function: Callable[[np.ndarray], float], x: Any, step: float = 4e-3) -> np.ndarray:
    """The gradient of a scalar function of one array, by differences, exact to about 1e-11 for smooth functions."""
    x = np.asarray(x, np.float64)
    result = np.zeros(x.size)
    for i in range(x.size):
        for distance, factor in _STENCIL:
            for sign in (1, -1):
                moved = x.copy().reshape(-1)
                moved[i] += sign * distance * step
                result[i] += sign * factor * function(moved.reshape(x.shape)) / step
    return result.reshape(x.shape)
