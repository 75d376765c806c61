"""How embeddings lie on the unit sphere: are positives close to each other, and is the sphere covered evenly?"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ntxent_jax import checks
from ntxent_jax.batch import Anchors, Batch, Candidates, ready
from ntxent_jax.devices import on_any_mesh
from ntxent_jax.engine import map_rows, rows_per_block
from ntxent_jax.numerics import compute_dtype, divide_or_zero, masked_log_sum
from ntxent_jax.pairs import Members, by_label
from ntxent_jax.scores import Options, matmul_precision, tile
from ntxent_jax.similarities import cosine_similarity, l2_normalize


@on_any_mesh
def alignment(
    view_a: ArrayLike, view_b: ArrayLike, *, exponent: ArrayLike = 2, where: ArrayLike | None = None
) -> jax.Array:
    r"""How far apart the two views of an item are, on average.

    Rows are scaled to unit length first. Then, over the real items,

    .. math::
        \frac{1}{n} \sum_{i=1}^{n} \lVert a_i - b_i \rVert^{\text{exponent}} .

    With exponent 2 it is 2 minus twice the mean cosine. A collapsed model reaches 0, so read it beside
    :func:`uniformity`.

    Args:
        view_a: Embeddings of one view, shape ``[n, d]``, floating.
        view_b: Embeddings of the other view, shape ``[n, d]``.
        exponent: Power of the distance, a scalar > 0.
        where: Boolean, shape ``[n]``. True for a real item. Default: all.

    Returns:
        Dimensionless scalar, from 0 (all views coincide) to ``2 ** exponent`` (all are opposite), with exponent 2 about
        2 for unrelated views in many dimensions; float32, or float64 for float64 rows. Differentiable: the gradient is
        0 where two views coincide and for an all-zero row, which stays the zero vector, at distance 1 from any unit
        vector. 0 with gradient 0 if no item is real.

    Raises:
        TypeError: An array is not floating, or ``where`` is not boolean.
        ValueError: A shape is wrong, or ``exponent`` is known beforehand and not > 0; a traced one gives NaN.

    Example:
        >>> import jax.numpy as jnp
        >>> view_a = jnp.array([[2.0, 0.0], [0.0, 1.0]])
        >>> view_b = jnp.array([[1.0, 0.0], [0.6, 0.8]])
        >>> print(f"{alignment(view_a, view_b):.4f} {alignment(view_a, view_b, exponent=1):.4f}")
        0.2000 0.3162

    References:
        Wang and Isola, "Understanding Contrastive Representation Learning through Alignment and Uniformity on the
        Hypersphere", 2020, https://arxiv.org/abs/2005.10242, eq. 7. Their code expects normalised rows.
    """
    a = checks.rows("view_a", view_a, "[n, d]")
    b = checks.rows("view_b", view_b, "[n, d]")
    checks.equal_shapes(view_a=a, view_b=b)
    a, b = checks.same_rows(view_a=a, view_b=b)
    real = checks.mask("where", where, a.shape[:1])
    real = jnp.ones(a.shape[0], jnp.bool_) if real is None else real
    power = checks.positive_number("exponent", exponent)
    two = isinstance(exponent, (int, float)) and exponent == 2
    result: jax.Array = _alignment(a, b, None if two else power, real)
    return result


@on_any_mesh
def uniformity(embeddings: ArrayLike, *, t: ArrayLike = 2, where: ArrayLike | None = None) -> jax.Array:
    r"""How evenly rows cover the unit sphere: the lower, the more evenly.

    Rows are scaled to unit length first. Then, over all pairs of different real rows,

    .. math::
        \log \frac{2}{n (n - 1)} \sum_{i < j} \exp(-t \lVert x_i - x_j \rVert^2) .

    It is computed block by block, with memory linear in ``n`` in the backward pass too, and as a log-sum of exponents
    that never underflows, for any ``t``.

    Args:
        embeddings: Shape ``[n, d]``, floating.
        t: Sharpness of the kernel, a scalar > 0.
        where: Boolean, shape ``[n]``. True for a real row. Default: all.

    Returns:
        Dimensionless scalar, from ``-4 t`` (two opposite rows) to 0 (all rows coincide); about ``-2 t`` for many rows
        spread evenly in many dimensions. float32, or float64 for float64 rows. Differentiable, with finite gradients at
        equal rows. An all-zero row stays the zero vector, at distance 1 from any unit vector, with gradient 0. With
        fewer than two real rows there is no pair: 0 with gradient 0.

    Raises:
        TypeError: ``embeddings`` is not floating, or ``where`` is not boolean.
        ValueError: A shape is wrong, or ``t`` is known beforehand and not > 0; a traced one gives NaN.

    Example:
        >>> import jax.numpy as jnp
        >>> print(f"{uniformity(jnp.array([[3.0, 0.0], [0.0, 1.0]])):.4f}")
        -4.0000

        Together with :func:`alignment` it is a loss:

        >>> def loss(view_a, view_b):
        ...     spread = (uniformity(view_a) + uniformity(view_b)) / 2
        ...     return alignment(view_a, view_b) + spread
        >>> print(f"{loss(jnp.eye(3), jnp.eye(3) + 0.1):.4f}")
        -3.6097

    References:
        Wang and Isola, "Understanding Contrastive Representation Learning through Alignment and Uniformity on the
        Hypersphere", 2020, https://arxiv.org/abs/2005.10242, section 4.1.2. Their code expects normalised rows, and its
        mean of exponentials is ``log(0)`` where all of them underflow.
    """
    rows = checks.rows("embeddings", embeddings, "[n, d]")
    n = rows.shape[0]
    sharpness = checks.positive_number("t", t).astype(compute_dtype(rows))
    # Every row is alone with its label, so all others are its negatives.
    members = Members(jnp.arange(n), checks.mask("where", where, (n,)), jnp.arange(n))
    temperature = 1 / jnp.where(sharpness > 0, sharpness, jnp.nan)
    result: jax.Array = _uniformity(Batch(rows, members, temperature), None)
    return result


@partial(jax.jit, static_argnames="block_size")
def _uniformity(batch: Batch, block_size: int | None) -> jax.Array:
    anchors, candidates = ready(batch, cosine_similarity)
    # |x|^2 of the scaled rows: 1, or 0 for a zero row. A constant, as scaled rows keep their length.
    length = jnp.any(batch.anchors != 0, axis=-1).astype(anchors.temperature.dtype)
    n = anchors.where.shape[0]

    def log_sums(own: Anchors, _: jax.Array, others: Candidates) -> jax.Array:
        pairs = tile(own, others, Options(by_label, cosine_similarity))
        squares = length[own.members.label][:, None] + length - 2 * pairs.scores
        total = masked_log_sum(-squares, pairs.masks.negative, pairs.temperature)
        return total.maximum / pairs.temperature + total.log_sum

    with jax.default_matmul_precision(matmul_precision(None, batch.anchors)):
        rows = map_rows(log_sums, anchors, candidates, rows_per_block(n, n, block_size))
    number = jnp.sum(anchors.where).astype(rows.dtype)
    # Each pair was met from both of its rows.
    total = masked_log_sum(rows[None], anchors.where[None] & (number > 1), jnp.ones(1, rows.dtype))
    pairs = jnp.where(number > 1, number * (number - 1), 1)
    return jnp.where(number > 1, total.maximum[0] + total.log_sum[0] - jnp.log(pairs), 0)


@jax.jit
def _alignment(a: jax.Array, b: jax.Array, exponent: jax.Array | None, where: jax.Array) -> jax.Array:
    """Mean power of the distances; exponent None is 2, which needs no square root and has all derivatives at 0."""
    dtype = compute_dtype(a)
    differ = jnp.any(a != b, axis=-1)
    a, b = (l2_normalize(jnp.where(where[:, None], x.astype(dtype), 1)) for x in (a, b))
    powers = jnp.sum(jnp.square(a - b), axis=-1)
    if exponent is not None:
        # Compiled, scaled copies of equal rows may differ in the last bit. NaN must stay NaN.
        apart = (differ & (powers != 0)) | jnp.isnan(powers)
        powers = jnp.where(apart, jnp.power(jnp.where(apart, powers, 1), exponent.astype(dtype) / 2), 0)
    mean = divide_or_zero(jnp.sum(jnp.where(where, powers, 0)), jnp.sum(where).astype(dtype))
    return mean if exponent is None else jnp.where(exponent > 0, mean, jnp.nan)
