"""From a batch to a loss: scores and pairs of one block of anchors, the formula, the weighted sum."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ntxent_jax import checks
from ntxent_jax.batch import Anchors, Batch, Candidates, ready
from ntxent_jax.engine import map_rows, rows_per_block, sum_over_rows
from ntxent_jax.formulas import Extras, Form, Sums, Terms, Tile, one_term, row_terms
from ntxent_jax.numerics import divide_or_zero, divide_scores
from ntxent_jax.pairs import PairMasks, Rule
from ntxent_jax.similarities import Similarity, compare, compare_own, is_builtin
from ntxent_jax.two_way import TwoWayTile, both_ways

Reduction = Literal["mean", "anchor_mean", "sum", "none"]


class Options(NamedTuple):
    """What is decided before any array is seen."""

    rule: Rule
    similarity: Similarity
    form: Form = "pair"
    one_positive: bool = False
    relative_margin: bool = False
    reduction: Reduction = "mean"
    block_size: int | None = None
    precision: str | None = None


def contrast(batch: Batch, options: Options) -> jax.Array:
    """The loss of anchors that choose among candidates."""
    return _run(_one_way, batch, options)


def contrast_both_ways(batch: Batch, options: Options) -> jax.Array:
    """The mean of the losses of both directions, each anchor and each candidate having one positive."""
    if options.reduction == "none":
        return (contrast(batch, options) + contrast(batch.turned(), options)) / 2
    return _run(_both_ways, batch, options)


def _run(loss: Callable[[Batch, Options], jax.Array], batch: Batch, options: Options) -> jax.Array:
    """Only the package's similarities go through its compilation cache: a user's may hold arrays that change."""
    checks.options(options.reduction, options.similarity, options.block_size, options.precision)
    return (_compiled if is_builtin(options.similarity) else _evaluate)(loss, batch, options)


def _evaluate(loss: Callable[[Batch, Options], jax.Array], batch: Batch, options: Options) -> jax.Array:
    return loss(batch, options)


_compiled = jax.jit(_evaluate, static_argnums=(0, 2))


def _one_way(batch: Batch, options: Options) -> jax.Array:
    anchors, candidates = ready(batch, options.similarity)
    block = rows_per_block(anchors.where.shape[0], candidates.members.label.shape[0], options.block_size)

    def terms(own: Anchors, real: jax.Array, others: Candidates) -> Terms:
        result = row_terms(tile(own, others, options), options.form, options.one_positive, others.extras)
        return _weighted(result, own.weights, own.where & real, options.reduction)

    def one_sum(own: Anchors, real: jax.Array, others: Candidates) -> tuple[jax.Array, jax.Array]:
        result = terms(own, real, others)
        return jnp.sum(result.total), result.number

    with jax.default_matmul_precision(matmul_precision(options.precision, batch.anchors)):
        if options.reduction == "none":
            rows = map_rows(lambda *args: terms(*args).total, anchors, candidates, block)
            return jnp.mean(rows.reshape(batch.members.label.shape[0], batch.views), axis=1)
        total, numbers = sum_over_rows(one_sum, anchors, candidates, block)
    return total if options.reduction == "sum" else divide_or_zero(total, jnp.sum(anchors.weights * numbers))


def _both_ways(batch: Batch, options: Options) -> jax.Array:
    anchors, candidates = ready(batch, options.similarity)
    block = rows_per_block(anchors.where.shape[0], anchors.where.shape[0], options.block_size)

    def tile_of(own: Anchors, real: jax.Array, others: tuple[Candidates, jax.Array]) -> TwoWayTile:
        result = tile(own, others[0], options)
        real = (own.where & real)[:, None]
        masks = PairMasks(result.masks.positive & real, result.masks.negative & real)
        return TwoWayTile(result.scores, masks, result.temperature, others[1])

    def finish(rows: Sums, columns: Sums, rest: tuple[jax.Array, jax.Array, jax.Array, Extras]) -> jax.Array:
        temperature, weights, where, extras = rest
        one, other = (one_term(way, temperature, "pair", extras, -1 / temperature) for way in (rows, columns))
        terms = _weighted(Terms((one + other) / 2, where.astype(one.dtype)), weights, where, options.reduction)
        return jnp.sum(terms.total)

    rest = (anchors.temperature, anchors.weights, anchors.where, candidates.extras)
    with jax.default_matmul_precision(matmul_precision(options.precision, batch.anchors)):
        total = both_ways(tile_of, finish, anchors, (candidates, anchors.temperature), rest, block)
    return total if options.reduction == "sum" else divide_or_zero(total, jnp.sum(anchors.weights))


def _weighted(terms: Terms, weights: jax.Array, real: jax.Array, reduction: Reduction) -> Terms:
    """What each anchor adds to the numerator of a reduction, and, times its weight, to the denominator."""
    number = jnp.where(real, terms.number, 0)
    total = jnp.where(number > 0, terms.total, 0)
    if reduction in ("anchor_mean", "none"):
        total, number = divide_or_zero(total, number), jnp.minimum(number, 1)
    silent = (weights == 0) & jnp.isinf(total)  # A weight of 0 silences an infinite loss, but not NaN.
    return Terms(weights * jnp.where(silent, 0, total), number)


def tile(own: Anchors, others: Candidates, options: Options) -> Tile:
    """Some anchors against all of their candidates: those that all anchors share, then their own."""
    similarities, masks = compare(options.similarity, own.rows, others.rows), options.rule(own.members, others.members)
    if own.pair_where is not None:
        masks = PairMasks(masks.positive, masks.negative & own.pair_where)
    if own.own is not None and own.plain is not None:
        similarities = _beside(similarities, compare_own(options.similarity, own.plain, own.own.rows))
        positive, negative = own.own.where & own.own.positive, own.own.where & ~own.own.positive
        masks = PairMasks(_beside(masks.positive, positive), _beside(masks.negative, negative))
    if others.margin is not None:
        similarities, masks = _filtered(similarities, masks, own, others, others.margin, options)
    added, lowest = _added_logits(similarities, masks, own, others), -1 / own.temperature
    if added is None:
        return Tile(similarities, masks, own.temperature, lowest)
    return Tile(divide_scores(similarities, own.temperature) + added, masks, jnp.ones_like(lowest), lowest)


def _filtered(
    similarities: jax.Array, masks: PairMasks, own: Anchors, others: Candidates, margin: jax.Array, options: Options
) -> tuple[jax.Array, PairMasks]:
    """Leave out negatives that a guide, or the batch itself, finds closer than the positive, less a margin."""
    guide = similarities
    if own.guide is not None and others.guide is not None:
        guide = compare(options.similarity, own.guide, others.guide)
        unknown = similarities.shape[1] - guide.shape[1]
        guide = jnp.pad(guide, ((0, 0), (0, unknown)), constant_values=-jnp.inf)
    guide = lax.stop_gradient(guide)
    right = jnp.sum(jnp.where(masks.positive, guide, 0), axis=1, keepdims=True)
    threshold = right - (jnp.abs(right) * margin if options.relative_margin else margin)
    unjudged = jnp.isnan(guide) | jnp.isnan(right)  # A guide's NaN is passed on, not taken for a verdict.
    return jnp.where(unjudged, jnp.nan, similarities), PairMasks(masks.positive, masks.negative & ~(guide > threshold))


def _added_logits(similarities: jax.Array, masks: PairMasks, own: Anchors, others: Candidates) -> jax.Array | None:
    """What is added to the similarities over the temperature, or None."""
    added = None
    if others.bias is not None:
        added = jnp.broadcast_to(others.bias, (similarities.shape[0], others.bias.shape[0]))
        if own.own is not None and own.own.bias is not None:
            added = _beside(added, own.own.bias)
    if others.hardness is not None:
        harder = masks.negative & (similarities != -jnp.inf)
        harder = jnp.where(harder, others.hardness * lax.stop_gradient(jnp.where(harder, similarities, 0)), 0)
        added = harder if added is None else added + harder
    return added


def _beside(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.concatenate([x, y], axis=1)


def matmul_precision(precision: str | None, rows: jax.Array) -> str | None:
    """Precision of matrix products. An accelerator may round factors to bfloat16, harmless only if they already are."""
    return "highest" if precision is None and rows.dtype != jnp.bfloat16 else precision
