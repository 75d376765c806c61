"""From a batch to a loss: which way of running it fits, and the reduction."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from ntxent_jax import checks
from ntxent_jax.batch import Anchors, Batch, Candidates, ready
from ntxent_jax.coupled import coupled_sum, is_coupled
from ntxent_jax.devices import alike
from ntxent_jax.engine import map_rows, rows_per_block, sum_over_rows
from ntxent_jax.numerics import divide_or_zero, level_of
from ntxent_jax.ring import ring_sum, ring_terms
from ntxent_jax.scores import Options, anchor_sum, anchor_terms, matmul_precision
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
    options = options._replace(precision=matmul_precision(options.precision, batch.anchors))
    with jax.default_matmul_precision(options.precision):
        return loss(alike(batch), options)


_compiled = jax.jit(_evaluate, static_argnums=(0, 2))


def _one_way(batch: Batch, options: Options) -> jax.Array:
    if batch.candidates is None and is_coupled(batch, options):
        return _reduced(*coupled_sum(batch, options), options)
    devices, ring = options.devices, options.devices.ring
    anchors, candidates = ready(batch, options.similarity, devices, options.only)
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
    if ring:
        total, numbers = ring_sum(anchors, candidates, options)
    else:
        total, numbers = sum_over_rows(partial(anchor_sum, options=options), anchors, candidates, block)
    return _reduced(total, anchors.weights * numbers, options)


def _anchor_losses(own: Anchors, real: jax.Array, others: Candidates, options: Options) -> jax.Array:
    return anchor_terms(own, real, others, options).total


def _both_ways(batch: Batch, options: Options) -> jax.Array:
    if is_coupled(batch, options):
        return _reduced(*coupled_sum(batch, options), options)
    other = options._replace(similarity=turned(options.similarity))
    return (_one_way(batch, options) + _one_way(batch.turned(), other)) / 2


def _reduced(total: jax.Array, counts: jax.Array, options: Options) -> jax.Array:
    total, count = options.devices.summed((total, jnp.sum(counts)))
    return total if options.reduction == "sum" else divide_or_zero(total, count)
