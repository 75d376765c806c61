"""From a batch to a loss: scores and pairs of one block of anchors, the formula, the weighted sum."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from ntxent_jax import checks
from ntxent_jax.batch import Anchors, Batch, Candidates, ready
from ntxent_jax.engine import map_rows, rows_per_block, sum_over_rows
from ntxent_jax.formulas import Form, Terms, row_terms
from ntxent_jax.numerics import divide_or_zero
from ntxent_jax.pairs import PairMasks, Rule
from ntxent_jax.similarities import Similarity, compare, compare_own, is_builtin

Reduction = Literal["mean", "anchor_mean", "sum", "none"]


class Options(NamedTuple):
    """What is decided before any array is seen."""

    rule: Rule
    similarity: Similarity
    form: Form = "pair"
    one_positive: bool = False
    reduction: Reduction = "mean"
    block_size: int | None = None
    precision: str | None = None


def contrast(batch: Batch, options: Options) -> jax.Array:
    """The loss of a batch.

    Only the package's own similarities go through its compilation cache: a user's function may hold arrays that change.
    """
    checks.choice("reduction", options.reduction, ("mean", "anchor_mean", "sum", "none"))
    checks.similarity(options.similarity)
    checks.block_size(options.block_size)
    checks.precision(options.precision)
    return (_compiled if is_builtin(options.similarity) else _contrast)(batch, options)


def _contrast(batch: Batch, options: Options) -> jax.Array:
    anchors, candidates = ready(batch, options.similarity)
    block = rows_per_block(anchors.where.shape[0], candidates.members.label.shape[0], options.block_size)

    def terms(own: Anchors, real: jax.Array, others: Candidates) -> Terms:
        result = row_terms(*tile(own, others, options.rule, options.similarity), options.form, options.one_positive)
        count = jnp.where(own.where & real, result.number, 0)
        total = jnp.where(count > 0, result.total, 0)
        if options.reduction in ("anchor_mean", "none"):
            total, count = divide_or_zero(total, count), jnp.minimum(count, 1)
        return Terms(_times(own.weights, total), count)

    def one_sum(own: Anchors, real: jax.Array, others: Candidates) -> tuple[jax.Array, jax.Array]:
        result = terms(own, real, others)
        return jnp.sum(result.total), result.number

    with jax.default_matmul_precision(matmul_precision(options.precision, batch.anchors)):
        if options.reduction == "none":
            rows = map_rows(lambda *args: terms(*args).total, anchors, candidates, block)
            return jnp.mean(rows.reshape(batch.items_and_views), axis=1)
        total, counts = sum_over_rows(one_sum, anchors, candidates, block)
    return total if options.reduction == "sum" else divide_or_zero(total, jnp.sum(anchors.weights * counts))


_compiled = jax.jit(_contrast, static_argnames="options")


def tile(
    own: Anchors, others: Candidates, rule: Rule, similarity: Similarity
) -> tuple[jax.Array, PairMasks, jax.Array]:
    """Scores ``[b, m]``, pairs and temperature ``[b]`` of some anchors; their logits are ``scores / temperature``."""
    scores = compare(similarity, own.rows, others.rows)
    masks, temperature = rule(own.members, others.members), own.temperature
    if own.pair_where is not None:
        masks = PairMasks(masks.positive, masks.negative & own.pair_where)
    if others.bias is not None:
        scores = scores / temperature[:, None] + others.bias
    if own.own is not None and own.plain is not None:
        own_scores = compare_own(similarity, own.plain, own.own.rows)
        if own.own.bias is not None:
            own_scores = own_scores / temperature[:, None] + own.own.bias
        scores = jnp.concatenate([scores, own_scores], axis=1)
        own_masks = PairMasks(own.own.where & own.own.positive, own.own.where & ~own.own.positive)
        masks = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), masks, own_masks)
    return scores, masks, temperature if others.bias is None else jnp.ones_like(temperature)


def matmul_precision(precision: str | None, rows: jax.Array) -> str | None:
    """Precision of matrix products. An accelerator may round factors to bfloat16, harmless only if they already are."""
    return "highest" if precision is None and rows.dtype != jnp.bfloat16 else precision


def _times(weights: jax.Array, values: jax.Array) -> jax.Array:
    """``weights * values``; a weight of 0 silences an infinite value, never NaN."""
    return weights * jnp.where((weights == 0) & jnp.isinf(values), 0, values)
