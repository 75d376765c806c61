"""From a batch to a loss: which way of running it fits, and the reduction."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from ntxent_jax import checks
from ntxent_jax.batch import Anchors, Batch, Candidates, ready
from ntxent_jax.coupled import coupled_sum, is_coupled
from ntxent_jax.devices import alike
from ntxent_jax.engine import map_rows, rows_per_block, sum_of_either, sum_over_rows
from ntxent_jax.formulas import Terms, negatives_of, one_term, only_positive
from ntxent_jax.numerics import divide_or_zero, level_of
from ntxent_jax.pairs import at_most_two_alike, somewhere
from ntxent_jax.ring import ring_sum, ring_terms
from ntxent_jax.scores import Options, anchor_sum, anchor_terms, matmul_precision, tile, weighted
from ntxent_jax.similarities import has_range, is_builtin, score_range, turned

Loss = Callable[[Batch, Options], jax.Array]


def contrast(batch: Batch, options: Options) -> jax.Array:
    """The loss of anchors that choose among candidates."""
    return _run(_one_way, batch, options)


def contrast_both_ways(batch: Batch, options: Options) -> jax.Array:
    """The mean of the losses of both directions, each anchor and each candidate having one positive."""
    return _run(_both_ways, batch, options)


def _run(loss: Loss, batch: Batch, options: Options) -> jax.Array:
    """Only the package's similarities go through its compilation cache: a user's may hold arrays that change."""
    checks.options(options.reduction, options.similarity, options.block_size, options.precision)
    return (_compiled if is_builtin(options.similarity) else _evaluate)(loss, batch, options)


def _evaluate(loss: Loss, batch: Batch, options: Options) -> jax.Array:
    with jax.default_matmul_precision(matmul_precision(options.precision, batch.anchors)):
        return loss(alike(batch), options)


_compiled = jax.jit(_evaluate, static_argnums=(0, 2))


def _one_way(batch: Batch, options: Options) -> jax.Array:
    devices, ring = options.devices, options.devices.ring
    anchors, candidates = ready(batch, options.similarity, devices)
    n, m = anchors.where.shape[0], candidates.members.label.shape[0]
    block = rows_per_block(n, m, options.block_size)
    if (ring or block < n) and has_range(options.similarity):
        bounds = score_range(options.similarity, anchors.rows, candidates.rows, devices)
        candidates = candidates._replace(level=level_of(*bounds, anchors.temperature))
    if options.reduction == "none":
        if ring:
            rows = ring_terms(anchors, candidates, options).total
        else:
            rows = map_rows(partial(_anchor_losses, options=options), anchors, candidates, block)
        return jnp.mean(rows.reshape(batch.members.label.shape[0], batch.views), axis=1)
    among_themselves = batch.candidates is None and (ring or devices.axis is None)
    if (ring or block < n) and among_themselves and is_coupled(batch, options):
        total, numbers = coupled_sum(batch, anchors, candidates, options)
    elif ring:
        total, numbers = ring_sum(anchors, candidates, options)
    elif block >= n and among_themselves and options.only is None and is_builtin(options.similarity):
        total, numbers = _whole_sum(anchors, candidates, options)
    else:
        total, numbers = sum_over_rows(partial(anchor_sum, options=options), anchors, candidates, block)
    return _reduced(total, anchors.weights * numbers, options)


def _anchor_losses(own: Anchors, real: jax.Array, others: Candidates, options: Options) -> jax.Array:
    return anchor_terms(own, real, others, options).total


def _whole_sum(anchors: Anchors, candidates: Candidates, options: Options) -> tuple[jax.Array, jax.Array]:
    """All at once, without the work on all pairs that several positives ask for if there are none."""

    def total(inputs: tuple[Anchors, Candidates], options: Options) -> tuple[jax.Array, jax.Array]:
        return anchor_sum(inputs[0], jnp.ones_like(inputs[0].where), inputs[1], options)

    alone, several = partial(total, options=options._replace(only=somewhere)), partial(total, options=options)
    return sum_of_either(at_most_two_alike(anchors.members.label), alone, several, (anchors, candidates))


def _both_ways(batch: Batch, options: Options) -> jax.Array:
    n, devices = batch.anchors.shape[0], options.devices
    whole = devices.axis is None and rows_per_block(n, n, options.block_size) >= n
    if options.reduction == "none" or not (whole or is_coupled(batch, options)):
        other = options._replace(similarity=turned(options.similarity))
        return (_one_way(batch, options) + _one_way(batch.turned(), other)) / 2
    anchors, candidates = ready(batch, options.similarity, devices)
    if whole:
        total = _whole_both_ways(anchors, candidates, options)
    else:
        total, _ = coupled_sum(batch, anchors, candidates, options)
    return _reduced(total, anchors.weights, options)


def _whole_both_ways(anchors: Anchors, candidates: Candidates, options: Options) -> jax.Array:
    scores, (positive, negative), temperature, lowest, *_ = tile(anchors, candidates, options)
    total = jnp.zeros_like(temperature)
    for axis, where in ((1, anchors.where[:, None]), (0, anchors.where[:, None])):
        only = only_positive(scores, positive & where, axis)
        negatives = negatives_of(scores, negative & where, temperature, axis)
        total += one_term(only.score, negatives, temperature, options.form, candidates.extras, lowest)
    terms = Terms(total / 2, anchors.where.astype(total.dtype))
    return jnp.sum(weighted(terms, anchors.weights, anchors.where, options.reduction).total)


def _reduced(total: jax.Array, counts: jax.Array, options: Options) -> jax.Array:
    total, count = options.devices.summed((total, jnp.sum(counts)))
    return total if options.reduction == "sum" else divide_or_zero(total, count)
