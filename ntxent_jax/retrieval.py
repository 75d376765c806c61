"""Searching rows by similarity: the nearest keys of each query, and how well they are the right ones.

Everything here is one visit of the ``[n, m]`` similarities, block by block, that keeps a few numbers of each query.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from ntxent_jax import checks
from ntxent_jax.batch import Anchors, Batch, Candidates, ready
from ntxent_jax.devices import ALONE, on_any_mesh, on_any_mesh_as, split_of
from ntxent_jax.engine import map_rows, rows_per_block
from ntxent_jax.inputs import query_batch, rows_for
from ntxent_jax.numerics import divide_or_nan
from ntxent_jax.pairs import Members, PairMasks, Rule, by_label, by_position, labelled, with_positions
from ntxent_jax.scores import Options, matmul_precision, tile
from ntxent_jax.similarities import Similarity, cosine_similarity, is_builtin

# Nearest keys looked at for a query, or 8, 64, ... times as many if it has more right keys than that.
_PLACES = 32


def _split_as_queries(queries: ArrayLike, *_: Any, **__: Any) -> PartitionSpec:
    return split_of(queries, 1)


@on_any_mesh_as(_split_as_queries)
def top_k(
    queries: ArrayLike,
    keys: ArrayLike,
    k: int,
    *,
    key_where: ArrayLike | None = None,
    similarity: Similarity = cosine_similarity,
    block_size: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    r"""The ``k`` keys most similar to each query, found exactly, in memory linear in the number of rows.

    Args:
        queries: Shape ``[n, d]``, floating; ``[n, ...]`` for a similarity of your own.
        keys: Shape ``[m, d]``, floating; ``[m, ...]`` for a similarity of your own.
        k: Number of keys wanted, 1 to ``m``.
        key_where: Boolean, shape ``[m]``. True for a real key. Default: all.
        similarity: Function ``(x [n, d], y [m, d]) -> [n, m]``, larger is more similar.
        block_size: Number of queries compared with all keys at once. Default: chosen so that a block stays in cache.

    Returns:
        Similarities ``[n, k]``, the largest first, float32 or float64; and the positions of their keys, int32,
        ``[n, k]``. Among equal ones the key that stands first comes first. NaN comes before every number, so that it
        does not stay hidden. Where there are fewer than ``k`` real keys, the rest are ``-inf`` and -1: select by
        ``indices >= 0`` before using them as indices, for -1 would take the last row. The scores are differentiable.

    Raises:
        TypeError: An array is not floating, ``key_where`` is not boolean, or ``k`` is not an integer.
        ValueError: A shape is wrong, or ``k`` is not between 1 and ``m``.

    Example:
        >>> import jax.numpy as jnp
        >>> queries = jnp.array([[1.0, 0.0], [0.0, 1.0]])
        >>> keys = jnp.array([[0.0, 2.0], [3.0, 4.0], [5.0, 0.0]])
        >>> scores, indices = top_k(queries, keys, 2)
        >>> print(scores, indices, sep="\n")
        [[1.  0.6]
         [1.  0.8]]
        [[2 1]
         [0 1]]
    """
    checks.options("none", similarity, block_size, None)
    batch = _queries_and_keys(queries, keys, key_where, similarity)
    number = checks.whole_number("k", k)
    if batch.candidates is not None and number > batch.candidates.shape[0]:
        raise ValueError(f"k must be at most the number of keys, {batch.candidates.shape[0]}, got {k}")
    return (_compiled_top_k if is_builtin(similarity) else _top_k)(batch, number, similarity, block_size)


@on_any_mesh
def retrieval_metrics(
    queries: ArrayLike,
    keys: ArrayLike | None = None,
    *,
    labels: ArrayLike | None = None,
    key_labels: ArrayLike | None = None,
    ids: ArrayLike | None = None,
    key_ids: ArrayLike | None = None,
    where: ArrayLike | None = None,
    key_where: ArrayLike | None = None,
    ks: Sequence[int] = (1, 5, 10),
    similarity: Similarity = cosine_similarity,
    block_size: int | None = None,
) -> dict[str, jax.Array]:
    r"""How well each query finds its right keys among all keys.

    Right is ``keys[i]`` for ``queries[i]``; with labels, every key of the query's label. All other keys are wrong, and
    keys of the query's id are neither. Without ``keys`` the queries are searched among themselves, each one without its
    own row (leave-one-out), which would be found first every time.

    Keys are ranked by similarity, ties against the model: a wrong key stands before a right one of equal similarity,
    so that a collapsed model, to which all keys are equal, scores as badly as it is. In the same spirit a wrong key
    whose similarity is NaN stands before all others, and such a right key behind them. With :math:`s_r` the
    similarity of the ``r``-th best right key, the place of that key is

    .. math::
        \text{place}_r = r + \#\{\text{wrong } j : \text{not } (s_j < s_r)\}

    and the rank of a query is the place of its best right key, 1 being perfect.

    Args:
        queries: Shape ``[n, d]``, floating.
        keys: Shape ``[m, d]``, floating; without labels ``m >= n``. Default: leave-one-out, which needs labels.
        labels: Integer or boolean labels of the queries, shape ``[n]``.
        key_labels: Labels of the keys, shape ``[m]``, needed if ``labels`` and ``keys`` are given.
        ids: Integer, shape ``[n]``. A key of the query's id is the same thing: neither right nor wrong. Without
            labels a query's own key is always right.
        key_ids: Integer, shape ``[m]``. Defaults to ``ids`` if there are as many keys as queries.
        where: Boolean, shape ``[n]``. True for a real query; the others do not count. Without ``keys`` they are not
            found either; nor is, without labels, the key of such a query.
        key_where: Boolean, shape ``[m]``. True for a real key. Default: all.
        ks: Numbers of nearest keys for ``recall@k`` and ``precision@k``, integers of at least 1.
        similarity: Function ``(x [n, d], y [m, d]) -> [n, m]``, larger is more similar.
        block_size: Number of queries compared with all keys at once. Default: chosen so that a block stays in cache.

    Returns:
        A dict of scalars, float32 or float64. All are between 0 and 1 and best at 1, except ``median_rank``. Each is a
        mean (a median) over the queries that count: real ones with at least one right key. If none counts, NaN.

        * ``recall@k``: share of queries with a right key among the ``k`` nearest, the hit rate: rank <= k. Other texts
          call by this name the share of the right keys that was found; with one right key they agree. By chance, with
          one right key, about ``k / m``.
        * ``mrr``: 1 / rank, the mean reciprocal rank.
        * ``median_rank``: median of the ranks, at least 1.

        With labels also, of a query that has ``R`` right keys,

        * ``precision@k``: share of right keys among the ``k`` nearest, which is below 1 if there are fewer than ``k``.
        * ``r_precision``: share of right keys among the ``R`` nearest.
        * ``map@r``: sum of ``r / place_r`` over the right keys with ``place_r <= R``, divided by ``R``.

    Raises:
        TypeError: An array has a wrong dtype, or ``ks`` are not integers.
        ValueError: A shape is wrong, one of a pair of arguments is missing, or an entry of ``ks`` is below 1.

    Example:
        >>> import jax.numpy as jnp
        >>> rows = jnp.array([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8], [0.0, 1.0]])
        >>> for name, value in retrieval_metrics(rows, labels=jnp.array([0, 0, 0, 1]), ks=(1, 2)).items():
        ...     print(f"{name:12} {value:.4f}")
        recall@1     1.0000
        recall@2     1.0000
        mrr          1.0000
        median_rank  1.0000
        precision@1  1.0000
        precision@2  0.8333
        r_precision  0.8333
        map@r        0.8333

        The last row is alone with its label: it does not count. Collapsed embeddings find nothing:

        >>> collapsed = retrieval_metrics(jnp.ones((16, 2)), jnp.ones((16, 2)))
        >>> print(f"{collapsed['recall@1']:.4f} {collapsed['mrr']:.4f}")
        0.0000 0.0625

    References:
        Musgrave, Belongie and Lim, "A Metric Learning Reality Check", 2020, https://arxiv.org/abs/2003.08505, section
        3.2 (R-precision and MAP@R). pytorch-metric-learning's ``AccuracyCalculator`` counts such ties as they happen to
        be sorted.
    """
    if not isinstance(ks, Sequence):
        raise TypeError(f"ks must be a sequence of ints, got {ks!r}; for a single one pass ks=({ks},)")
    numbers = tuple(checks.whole_number("each of ks", k) for k in ks)
    checks.options("none", similarity, block_size, None)
    if labels is not None:
        rule: Rule = by_label
        batch = _labelled_queries(queries, labels, ids, where, keys, key_labels, key_ids, key_where, similarity)
    elif keys is not None:
        rule = by_position
        checks.only_with("labels", key_labels=key_labels)
        batch = query_batch(
            queries,
            keys,
            1.0,
            ids=ids,
            key_ids=key_ids,
            key_where=key_where,
            where=where,
            weights=None,
            similarity=similarity,
            devices=ALONE,
        )
    else:
        raise ValueError("without keys a query's own row is left out; pass labels to say which others are right")
    run = _compiled_metrics if is_builtin(similarity) else _metrics
    result: dict[str, jax.Array] = run(batch, rule, numbers, similarity, block_size)
    names = [*(f"recall@{k}" for k in numbers), "mrr", "median_rank"]
    if labels is not None:
        names += [*(f"precision@{k}" for k in numbers), "r_precision", "map@r"]
    return {name: result[name] for name in names}  # JAX sorts the names of a dict.


def _top_k(batch: Batch, k: int, similarity: Similarity, block_size: int | None) -> tuple[jax.Array, jax.Array]:
    keys, members = batch.candidates, batch.candidate_members
    assert keys is not None and members is not None
    order = None
    if members.where is not None:  # Hidden keys behind all others, so that none takes the place of a score of -inf.
        order = jnp.argsort(~members.where, stable=True)
        keys, members = keys[order], members._replace(where=members.where[order])

    def nearest(scores: jax.Array, masks: PairMasks) -> tuple[jax.Array, jax.Array]:
        scores = jnp.where(jnp.isnan(scores), jnp.nan, scores)  # -NaN would be sorted behind all numbers.
        values, places = lax.top_k(jnp.where(masks.positive | masks.negative, scores, -jnp.inf), k)
        return values, places

    batch = batch._replace(candidates=keys, candidate_members=members)
    scores, indices = _visit(nearest, batch, by_position, similarity, block_size)
    if order is None or members.where is None:
        return scores, indices
    found = jnp.arange(k) < jnp.sum(members.where)
    return jnp.where(found, scores, -jnp.inf), jnp.where(found, order[indices], -1).astype(indices.dtype)


def _metrics(
    batch: Batch, rule: Rule, ks: tuple[int, ...], similarity: Similarity, block_size: int | None
) -> dict[str, jax.Array]:
    of_queries = partial(_query_metrics, ks=ks, with_labels=rule is by_label)
    rows = _visit(of_queries, batch, rule, similarity, block_size)
    counts = rows.pop("right") > 0
    if batch.members.where is not None:
        counts &= batch.members.where
    number = jnp.sum(counts).astype(rows["mrr"].dtype)
    result = {name: divide_or_nan(jnp.sum(jnp.where(counts, row, 0)), number) for name, row in rows.items()}
    return result | {"median_rank": _median(rows["median_rank"], counts)}


_compiled_top_k = jax.jit(_top_k, static_argnums=(1, 2, 3))
_compiled_metrics = jax.jit(_metrics, static_argnums=(1, 2, 3, 4))


def _visit(
    f: Callable[[jax.Array, PairMasks], Any],
    batch: Batch,
    rule: Rule,
    similarity: Similarity,
    block_size: int | None,
) -> Any:
    """Rows that ``f`` makes of the similarities ``[b, m]`` and pairs of some queries, for all queries."""
    queries, keys = ready(batch, similarity)

    def of_block(own: Anchors, _: jax.Array, others: Candidates) -> Any:
        pairs = tile(own, others, Options(rule, similarity))
        return f(pairs.scores, pairs.masks)

    block = rows_per_block(queries.where.shape[0], keys.members.label.shape[0], block_size)
    with jax.default_matmul_precision(matmul_precision(None, batch.anchors)):
        return map_rows(of_block, queries, keys, block)


def _query_metrics(
    scores: jax.Array, masks: PairMasks, *, ks: tuple[int, ...], with_labels: bool
) -> dict[str, jax.Array]:
    """The metrics of each query, meaningless without a right key, and its number of right keys."""
    missing, dtype = jnp.isnan(scores), scores.dtype
    right = jnp.where(masks.positive & ~missing, scores, -jnp.inf)
    wrong = jnp.where(masks.negative, jnp.where(missing, jnp.inf, scores), -jnp.inf)
    best = jnp.max(right, axis=1, initial=-jnp.inf)
    rank = 1 + jnp.sum(masks.negative & ~(wrong < best[:, None]), axis=1)
    result = {f"recall@{k}": (rank <= k).astype(dtype) for k in ks}
    result |= {"mrr": 1 / rank.astype(dtype), "median_rank": rank.astype(dtype)}
    number = jnp.sum(masks.positive, axis=1)
    if with_labels:
        result |= _places_of_right_keys(right, wrong, number, jnp.sum(masks.negative, axis=1), ks)
    return result | {"right": number}


def _places_of_right_keys(
    right: jax.Array, wrong: jax.Array, num_right: jax.Array, num_wrong: jax.Array, ks: tuple[int, ...]
) -> dict[str, jax.Array]:
    """Precisions, from the nearest right keys and the nearest wrong ones; how many of each depends on the data."""

    def among(width: int, right: jax.Array, wrong: jax.Array) -> dict[str, jax.Array]:
        nearest_right, nearest_wrong = lax.top_k(right, width)[0], lax.top_k(wrong, width)[0]
        # Wrong keys not below a right one. If there are more than `width`, its place is beyond all that matter.
        before = jax.vmap(partial(jnp.searchsorted, side="right"))(-nearest_wrong, -nearest_right)
        r = jnp.arange(1, width + 1)
        place = r + jnp.minimum(before, num_wrong[:, None])
        exists = r <= num_right[:, None]
        divisor = jnp.maximum(num_right, 1).astype(right.dtype)

        def found(k: ArrayLike) -> jax.Array:
            return exists & (place <= k)

        first = found(num_right[:, None])
        result = {f"precision@{k}": jnp.sum(found(k), axis=1).astype(right.dtype) / k for k in ks}
        result["r_precision"] = jnp.sum(first, axis=1).astype(right.dtype) / divisor
        result["map@r"] = jnp.sum(jnp.where(first, r / place, 0).astype(right.dtype), axis=1) / divisor
        return result

    m, widths = right.shape[1], [max((_PLACES, *ks))]
    while widths[-1] < m:
        widths.append(8 * widths[-1])
    widths[-1] = m
    enough = sum((jnp.max(num_right, initial=0) > width).astype(jnp.int32) for width in widths[:-1])
    result: dict[str, jax.Array] = lax.switch(enough, [partial(among, width) for width in widths], right, wrong)
    return result


def _median(x: jax.Array, counts: jax.Array) -> jax.Array:
    """Median of the entries that count, NaN if there are none."""
    number = jnp.sum(counts)
    ordered = jnp.append(jnp.sort(jnp.where(counts, x, jnp.inf)), jnp.inf)
    middle = (ordered[jnp.maximum(number - 1, 0) // 2] + ordered[number // 2]) / 2
    return jnp.where(number > 0, middle, jnp.nan)


def _queries_and_keys(
    queries: ArrayLike, keys: ArrayLike, key_where: ArrayLike | None, similarity: Similarity
) -> Batch:
    """Queries to be compared with all real keys, whatever belongs together."""
    x, y = checks.same_rows(
        queries=rows_for(similarity, "queries", queries, "[n, d]"), keys=rows_for(similarity, "keys", keys, "[m, d]")
    )
    n, m = x.shape[0], y.shape[0]
    key_members = Members(jnp.arange(m), checks.mask("key_where", key_where, (m,)))
    return Batch(x, Members(jnp.arange(n)), jnp.ones(()), candidates=y, candidate_members=key_members)


def _labelled_queries(
    queries: ArrayLike,
    labels: ArrayLike,
    ids: ArrayLike | None,
    where: ArrayLike | None,
    keys: ArrayLike | None,
    key_labels: ArrayLike | None,
    key_ids: ArrayLike | None,
    key_where: ArrayLike | None,
    similarity: Similarity,
) -> Batch:
    """Queries, and keys if they are not searched among themselves, whose labels say what is right."""
    x, y = rows_for(similarity, "queries", queries, "[n, d]"), None
    if keys is None:
        checks.only_with("keys", key_labels=key_labels)
    else:
        checks.together(labels=labels, key_labels=key_labels)
        x, y = checks.same_rows(queries=x, keys=rows_for(similarity, "keys", keys, "[m, d]"))
        key_ids = ids if key_ids is None and y.shape[0] == x.shape[0] else key_ids
    members, key_members = labelled(
        x.shape[:1],
        labels,
        None if y is None else y.shape[:1],
        key_labels,
        where=where,
        candidate_where=key_where,
        ids=ids,
        candidate_ids=key_ids,
        candidate="key",
    )
    if y is None:
        members = with_positions(members, jnp.arange(x.shape[0]))
    return Batch(x, members, jnp.ones(()), candidates=y, candidate_members=key_members)
