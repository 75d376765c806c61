"""What a batch can teach: the smallest loss a model can reach, and statistics of the pairs of a batch."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ntxent_jax import checks
from ntxent_jax.batch import Anchors, Batch, Candidates, ready
from ntxent_jax.devices import AxisName, Devices, alike, devices_along, on_any_mesh
from ntxent_jax.engine import map_rows, rows_per_block
from ntxent_jax.inputs import labelled_batch
from ntxent_jax.numerics import compute_dtype, divide_or_nan
from ntxent_jax.pairs import by_label
from ntxent_jax.scores import Options, matmul_precision, tile
from ntxent_jax.similarities import Similarity, cosine_similarity, is_builtin


def loss_floor(
    num_negatives: ArrayLike,
    temperature: ArrayLike,
    *,
    num_positives: ArrayLike = 1,
    lowest_similarity: ArrayLike = -1.0,
) -> jax.Array:
    r"""Smallest loss that a softmax over cosines can reach: why the loss of a perfect model is not 0.

    Cosines end at -1, so with every positive at 1 and every negative at ``lowest_similarity`` the negatives keep a
    share of the softmax, and the loss is

    .. math::
        \log\bigl(P + k \exp((\text{lowest} - 1) / \tau)\bigr)

    with :math:`P` positives in the denominator and :math:`k` negatives. The share grows with the number of negatives
    and shrinks with the temperature.

    Args:
        num_negatives: Number ``k`` of negatives of an anchor, at least 0.
        temperature: Dimensionless, > 0.
        num_positives: Number of positives in the denominator: 1, or all of an anchor's positives for
            :func:`supcon_loss` and ``denominator="all"``.
        lowest_similarity: Similarity of a negative, from -1 to 1. -1 bounds a single anchor; three or more items cannot
            all be opposite to each other, and for a batch of ``N`` items the bound that can be reached is
            ``-1 / (N - 1)``, the corners of a simplex.

    Returns:
        Loss in nats, float32 (float64 for float64 arguments), shape of the arguments broadcast together. NaN where a
        traced argument is out of its range.

    Raises:
        ValueError: An argument is known beforehand and out of its range.

    Example:
        One positive, two perfect negatives, at temperature 1 and at 1/20:

        >>> print(f"{loss_floor(2, 1.0):.4f} {loss_floor(2, 0.05):.3e}")
        0.2395 8.497e-18

        Two views of 256 items, as :func:`ntxent_views` sees them:

        >>> print(f"{loss_floor(2 * 255, 0.5, lowest_similarity=-1 / 255):.4f}")
        4.2411
    """
    checks.positive("temperature", temperature)
    checks.within("num_negatives", num_negatives, 0)
    checks.within("num_positives", num_positives, 0)
    checks.within("lowest_similarity", lowest_similarity, -1, 1)
    arguments = [
        checks.array("num_negatives", num_negatives),
        checks.array("temperature", temperature),
        checks.array("num_positives", num_positives),
        checks.array("lowest_similarity", lowest_similarity),
    ]
    k, t, p, lowest = (x.astype(compute_dtype(*arguments)) for x in arguments)
    possible = (k >= 0) & (t > 0) & (p >= 0) & (jnp.abs(lowest) <= 1)
    return jnp.where(possible, jnp.log1p((p - 1) + k * jnp.exp((lowest - 1) / t)), jnp.nan)


class BatchStatistics(NamedTuple):
    """What a batch of labelled rows looks like to a loss. All are scalars; a mean over nothing is NaN.

    Attributes:
        num_anchors: Number of anchors that count: real rows with at least one positive.
        num_positives: Number of ordered positive pairs.
        num_negatives: Number of ordered negative pairs, those of anchors without a positive too.
        positive_similarity: Mean over positive pairs. Near 1 from the first step on: the views are identical.
        negative_similarity: Mean over negative pairs. Near ``positive_similarity``: the rows have collapsed.
        hardest_negative_similarity: Mean over real anchors of their most similar negative.
        accuracy: Share of the anchors that count whose most similar candidate is a positive; ties count against them.
        chance_loss: ``ntxent`` of these pairs when all similarities are equal, in nats, to compare a loss with.
    """

    num_anchors: jax.Array
    num_positives: jax.Array
    num_negatives: jax.Array
    positive_similarity: jax.Array
    negative_similarity: jax.Array
    hardest_negative_similarity: jax.Array
    accuracy: jax.Array
    chance_loss: jax.Array


@on_any_mesh
def batch_statistics(
    embeddings: ArrayLike,
    labels: ArrayLike,
    *,
    candidates: ArrayLike | None = None,
    candidate_labels: ArrayLike | None = None,
    candidate_where: ArrayLike | None = None,
    ids: ArrayLike | None = None,
    candidate_ids: ArrayLike | None = None,
    where: ArrayLike | None = None,
    similarity: Similarity = cosine_similarity,
    block_size: int | None = None,
    axis_name: AxisName | None = None,
) -> BatchStatistics:
    """Numbers worth logging beside the loss: they show a batch without positives, a collapse, or identical views.

    Args:
        embeddings: Rows, floating, shape ``[n, d]``, or ``[n, views, d]`` with one label for all views of an item.
        labels: Integer or boolean, shape ``[n]``. Any values; only equality counts.
        candidates: Rows that the anchors choose among instead of among themselves, floating, shape ``[m, d]``.
        candidate_labels: Labels of the candidates, shape ``[m]``, needed if candidates are given.
        candidate_where: Boolean, shape ``[m]``. True for a real candidate. Default: all.
        ids: Integer, shape ``[n]``, or ``[n, views]`` for ``[n, views, d]`` rows. Rows of equal id are the same thing:
            neither positive nor negative. Default: each row of the batch is a thing of its own.
        candidate_ids: Integer, shape ``[m]``, needed if ``ids`` and candidates are given.
        where: Boolean, shape ``[n]``. True for a real row or item: the others are neither anchors nor, without
            candidates, anyone's candidates. Default: all.
        similarity: Function ``(x [n, d], y [m, d]) -> [n, m]``, larger is more similar.
        block_size: Number of anchors compared with all candidates at once. Default: chosen so that a block stays in
            cache.
        axis_name: As in :func:`ntxent`: statistics of the batch on all devices.

    Returns:
        A :class:`BatchStatistics` of scalars, float32, or float64 for float64 rows.

    Raises:
        TypeError: An array has a wrong dtype.
        ValueError: A shape is wrong, one of a pair of arguments is missing, or ``block_size`` is not a positive int.

    Example:
        >>> import jax.numpy as jnp
        >>> embeddings = jnp.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]])
        >>> statistics = batch_statistics(embeddings, jnp.array([0, 0, 1, 2]))
        >>> for name, value in zip(statistics._fields, statistics):
        ...     print(f"{name:28} {value:.4f}")
        num_anchors                  2.0000
        num_positives                2.0000
        num_negatives                10.0000
        positive_similarity          0.8000
        negative_similarity          0.5920
        hardest_negative_similarity  0.8300
        accuracy                     0.5000
        chance_loss                  1.0986
    """
    devices = devices_along(axis_name)
    batch = labelled_batch(
        embeddings,
        labels,
        1.0,
        candidates,
        candidate_labels,
        candidate_where,
        ids,
        candidate_ids,
        where,
        devices=devices,
    )
    checks.options("none", similarity, block_size, None)
    return (_compiled if is_builtin(similarity) else _statistics)(batch, similarity, block_size, devices)


def _statistics(batch: Batch, similarity: Similarity, block_size: int | None, devices: Devices) -> BatchStatistics:
    anchors, candidates = ready(alike(batch), similarity, devices)
    block = rows_per_block(anchors.where.shape[0], candidates.members.label.shape[0], block_size)
    with jax.default_matmul_precision(matmul_precision(None, batch.anchors)):
        rows = map_rows(partial(_row_statistics, similarity=similarity), anchors, candidates, block)
    counts = anchors.where & (rows["num_positives"] > 0)
    total = {name: jnp.sum(jnp.where(anchors.where, value, 0)) for name, value in rows.items()}
    counted = (counts, anchors.where & (rows["num_negatives"] > 0))
    num_anchors, with_negatives = (jnp.sum(flags).astype(rows["right"].dtype) for flags in counted)
    total, num_anchors, with_negatives = devices.summed((total, num_anchors, with_negatives))
    return BatchStatistics(
        num_anchors=num_anchors,
        num_positives=total["num_positives"],
        num_negatives=total["num_negatives"],
        positive_similarity=divide_or_nan(total["positive"], total["num_positives"]),
        negative_similarity=divide_or_nan(total["negative"], total["num_negatives"]),
        hardest_negative_similarity=divide_or_nan(total["hardest"], with_negatives),
        accuracy=divide_or_nan(total["right"], num_anchors),
        chance_loss=divide_or_nan(total["chance"], total["num_positives"]),
    )


_compiled = jax.jit(_statistics, static_argnums=(1, 2, 3))


def _row_statistics(
    own: Anchors, real: jax.Array, others: Candidates, *, similarity: Similarity
) -> dict[str, jax.Array]:
    """Sums over the candidates of each anchor."""
    scores, (positive, negative), *_ = tile(own, others, Options(by_label, similarity))
    num_positives, num_negatives = (jnp.sum(mask, axis=1).astype(scores.dtype) for mask in (positive, negative))
    hardest = jnp.max(scores, axis=1, initial=-jnp.inf, where=negative)
    closest = jnp.max(scores, axis=1, initial=-jnp.inf, where=positive)
    return {
        "num_positives": num_positives,
        "num_negatives": num_negatives,
        "positive": jnp.sum(jnp.where(positive, scores, 0), axis=1),
        "negative": jnp.sum(jnp.where(negative, scores, 0), axis=1),
        "hardest": jnp.where(num_negatives > 0, hardest, 0),
        "right": (closest > hardest).astype(scores.dtype),
        "chance": num_positives * jnp.log1p(num_negatives),
    }
