"""Similarities of two sets of rows, and how the engine evaluates them block by block.

Each built-in similarity is two steps: ``prepare`` does once per row what concerns that row alone (its norm),
``compare`` does the rest for any two blocks of prepared rows. A user's own function has nothing to prepare. Distances
need a point that all rows are measured from, their ``origin``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from ntxent_jax import checks
from ntxent_jax.devices import ALONE, Devices
from ntxent_jax.numerics import Factors, compute_dtype, inverse_norm, power_of_two_scale, products, unit_rows

Similarity = Callable[[jax.Array, jax.Array], jax.Array]


class Rows(NamedTuple):
    """Rows ready to be compared.

    Attributes:
        values: Shape ``[n, d]`` (``[n, ...]`` for a user's similarity).
        factors: What goes with each row: its inverse norm or its squared length, shape ``[n]``, or None.
    """

    values: jax.Array
    factors: jax.Array | None = None


def cosine_similarity(x: ArrayLike, y: ArrayLike) -> jax.Array:
    """Cosine of the angle between every row of ``x`` and every row of ``y``.

    Exact for rows of any length that their dtype can hold: each row is brought near unit scale by a power of two
    before its norm is taken.

    Args:
        x: Shape ``[n, d]``, floating.
        y: Shape ``[m, d]``, floating.

    Returns:
        Dimensionless, in ``[-1, 1]`` up to rounding, shape ``[n, m]``; float32, or float64 for float64 rows. 0 with
        gradient 0 for an all-zero row, the only choice that treats ``x`` and ``-x`` alike.

    Raises:
        TypeError: ``x`` or ``y`` is not floating.
        ValueError: ``x`` or ``y`` is not of rank 2, or their feature sizes differ.

    Example:
        >>> import jax.numpy as jnp
        >>> print(cosine_similarity(jnp.array([[3.0, 0.0], [0.0, 0.0]]), jnp.array([[2.0, 0.0], [-1e-30, 0.0]])))
        [[ 1. -1.]
         [ 0.  0.]]
    """
    return _evaluate(cosine_similarity, x, y)


def dot_product(x: ArrayLike, y: ArrayLike) -> jax.Array:
    """Dot product of every row of ``x`` with every row of ``y``, rows as they are.

    Args:
        x: Shape ``[n, d]``, floating.
        y: Shape ``[m, d]``, floating.

    Returns:
        Shape ``[n, m]``; float32, or float64 for float64 rows.

    Raises:
        TypeError: ``x`` or ``y`` is not floating.
        ValueError: ``x`` or ``y`` is not of rank 2, or their feature sizes differ.

    Example:
        >>> import jax.numpy as jnp
        >>> print(dot_product(jnp.array([[3.0, 0.0]]), jnp.array([[2.0, 0.0], [0.0, 1.0]])))
        [[6. 0.]]
    """
    return _evaluate(dot_product, x, y)


def log1p_cosine_similarity(x: ArrayLike, y: ArrayLike) -> jax.Array:
    """``log(1 + cos)``, under which a perfect negative has probability exactly 0.

    The softmax over these is proportional to ``(1 + cos) ** (1 / temperature)``, to ``1 + cos`` at temperature 1. With
    plain cosines an opposite row keeps the probability ``exp(-2 / temperature)`` relative to the positive, so the loss
    of a perfect model is not 0 (:func:`ntxent_jax.loss_floor`); with this similarity it is, for any number of perfect
    negatives.

    Args:
        x: Shape ``[n, d]``, floating.
        y: Shape ``[m, d]``, floating.

    Returns:
        At most ``log(2)``, shape ``[n, m]``; float32, or float64 for float64 rows. ``-inf`` with gradient 0 where the
        cosine is -1: as a negative it vanishes, as a positive it makes the loss ``inf`` and receives no gradient.

    Raises:
        TypeError: ``x`` or ``y`` is not floating.
        ValueError: ``x`` or ``y`` is not of rank 2, or their feature sizes differ.

    Example:
        >>> import jax.numpy as jnp
        >>> x, y = jnp.array([[1.0, 0.0]]), jnp.array([[2.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
        >>> print(log1p_cosine_similarity(x, y).round(4))
        [[0.6931 0.       -inf]]
    """
    return _evaluate(log1p_cosine_similarity, x, y)


def negative_euclidean_distance(x: ArrayLike, y: ArrayLike) -> jax.Array:
    """Minus the Euclidean distance between every row of ``x`` and every row of ``y``.

    Rows are not normalised; pytorch-metric-learning's ``LpDistance`` normalises them first, which
    :func:`l2_normalize` does here.

    It is computed from squared lengths and one matrix product, after the mean of ``y`` was subtracted from both sides.
    With ``r`` the larger length of two rows measured from that mean, the distance is off by at most about
    ``4 * eps * r**2 / distance``, and by ``2 * sqrt(eps) * r`` for rows that nearly coincide.

    Args:
        x: Shape ``[n, d]``, floating.
        y: Shape ``[m, d]``, floating.

    Returns:
        At most 0, shape ``[n, m]``; float32, or float64 if ``x`` or ``y`` is. The gradient is 0 where two rows
        coincide.

    Raises:
        TypeError: ``x`` or ``y`` is not floating.
        ValueError: ``x`` or ``y`` is not of rank 2, or their feature sizes differ.

    Example:
        >>> import jax.numpy as jnp
        >>> print(negative_euclidean_distance(jnp.array([[3.0, 0.0]]), jnp.array([[0.0, 4.0], [3.0, 1.0]])))
        [[-5. -1.]]
    """
    return _evaluate(negative_euclidean_distance, x, y)


def l2_normalize(x: ArrayLike, axis: int = -1) -> jax.Array:
    """Scale ``x`` to unit Euclidean length along ``axis``.

    Args:
        x: Floating, any shape.
        axis: Axis that holds one vector.

    Returns:
        Same shape and dtype as ``x``. An all-zero vector stays zero, with gradient 0. Lengths are exact at any scale
        the dtype can hold, since no small constant is added to the norm.

    Raises:
        TypeError: ``x`` is not floating.

    Example:
        >>> import jax.numpy as jnp
        >>> print(l2_normalize(jnp.array([[3.0, 4.0], [0.0, 0.0], [3e-30, 4e-30]])))
        [[0.6 0.8]
         [0.  0. ]
         [0.6 0.8]]
    """
    array = checks.floating("x", x)
    exact = jnp.moveaxis(array.astype(compute_dtype(array)), axis, -1)
    return jnp.moveaxis(unit_rows(exact), -1, axis).astype(array.dtype)


def is_builtin(similarity: Similarity) -> bool:
    """Whether ``similarity`` is one of this module's: pure, without state, safe as the key of a compilation cache."""
    return any(similarity is known for known in _STEPS)


def turned(similarity: Similarity) -> Similarity:
    """The similarity of the same pairs with the sides exchanged: one of a user's need not be symmetric."""
    if is_builtin(similarity):
        return similarity

    def exchanged(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.swapaxes(similarity(y, x), 0, 1)

    return exchanged


def origin_of(similarity: Similarity, x: jax.Array, y: jax.Array, devices: Devices = ALONE) -> jax.Array | None:
    """The point, shape ``[d]``, from which rows of all devices are to be measured, if ``similarity`` needs one."""
    origin = _steps(similarity).origin
    return None if origin is None else origin(x, y, devices)


def prepare(similarity: Similarity, x: jax.Array, origin: jax.Array | None) -> Rows:
    """Do once per row what ``similarity`` does to each row alone."""
    return _steps(similarity).prepare(x, origin)


def prepare_both(similarity: Similarity, x: jax.Array, y: jax.Array, devices: Devices = ALONE) -> tuple[Rows, Rows]:
    """Prepare two sets of rows for each other."""
    origin = origin_of(similarity, x, y, devices)
    return prepare(similarity, x, origin), prepare(similarity, y, origin)


def compare(similarity: Similarity, x: Rows, y: Rows) -> jax.Array:
    """Similarities ``[n, m]`` of two blocks of prepared rows, in the dtype of the computation."""
    return _steps(similarity).compare(x, y)


def compare_own(similarity: Similarity, x: jax.Array, own: jax.Array) -> jax.Array:
    """Similarities ``[n, k]`` of each row of ``x [n, d]`` to its own rows ``own [n, k, d]``."""
    return jax.vmap(lambda row, rows: compare(similarity, *prepare_both(similarity, row[None], rows))[0])(x, own)


def factors_of(similarity: Similarity, x: Rows, y: Rows, precision: str | None) -> Factors | None:
    """Rows whose products are the similarities, if they are nothing else."""
    if _steps(similarity).compare is not _scaled_products or x.factors is not None or y.factors is not None:
        return None
    return Factors(x.values, y.values, precision)


def compare_each(similarity: Similarity, x: Rows, y: Rows) -> jax.Array:
    """Similarities ``[n]`` of row ``i`` of one set of prepared rows to row ``i`` of another."""
    if factors_of(similarity, x, y, None) is not None:
        return jnp.sum(x.values * y.values, axis=1)

    def one(*pair: Rows) -> jax.Array:
        return compare(similarity, *jax.tree.map(lambda row: row[None], pair))[0, 0]

    return jax.vmap(one)(x, y)


def has_range(similarity: Similarity) -> bool:
    """Whether the length of rows sets bounds to their similarities."""
    return _steps(similarity).reach is not None


def score_range(similarity: Similarity, x: Rows, y: Rows, devices: Devices = ALONE) -> tuple[jax.Array, jax.Array]:
    """The lowest and the highest similarity that rows of this length can have, with those of all devices."""
    reach = _steps(similarity).reach
    assert reach is not None
    return reach(*devices.largest((_longest(x), _longest(y))))


class _Steps(NamedTuple):
    prepare: Callable[[jax.Array, jax.Array | None], Rows]
    compare: Callable[[Rows, Rows], jax.Array]
    reach: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]] | None = None  # From the longest rows.
    origin: Callable[[jax.Array, jax.Array, Devices], jax.Array] | None = None


def _steps(similarity: Similarity) -> _Steps:
    if is_builtin(similarity):  # By identity: a user's callable need not be hashable.
        return _STEPS[similarity]

    def call(x: Rows, y: Rows) -> jax.Array:
        scores = checks.similarity_result(similarity(x.values, y.values), x.values.shape[0], y.values.shape[0])
        return scores.astype(compute_dtype(scores))

    return _Steps(lambda x, _: Rows(x), call)


def _evaluate(similarity: Similarity, x: ArrayLike, y: ArrayLike) -> jax.Array:
    rows, columns = checks.same_rows(x=checks.rows("x", x, "[n, d]"), y=checks.rows("y", y, "[m, d]"))
    return compare(similarity, *prepare_both(similarity, rows, columns))


def _unit_rows(x: jax.Array, _: jax.Array | None) -> Rows:
    exact = x.astype(compute_dtype(x))
    if x.dtype == exact.dtype:
        return Rows(unit_rows(exact))
    scaled = exact * power_of_two_scale(exact)
    # Half-precision rows are multiplied as they are, which a fast matrix unit does exactly. Normalised first, they
    # would be rounded to that unit's precision: an error of 1e-3 in the cosine.
    return Rows(scaled, inverse_norm(scaled)[:, 0])


def _scaled_products(x: Rows, y: Rows) -> jax.Array:
    scores = products(x.values, y.values)
    if x.factors is not None:
        scores = scores * x.factors[:, None]
    if y.factors is not None:
        scores = scores * y.factors[None, :]
    return scores


def _log1p_products(x: Rows, y: Rows) -> jax.Array:
    cosines = _scaled_products(x, y)
    opposite = cosines <= -1  # True for -1 - eps; False for NaN, which must stay NaN.
    return jnp.where(opposite, -jnp.inf, jnp.log1p(jnp.where(opposite, 0, cosines)))


def _center(x: jax.Array, y: jax.Array, devices: Devices) -> jax.Array:
    # Distances do not change when all rows move together, but |x|^2 + |y|^2 - 2xy loses less near the origin.
    center = jnp.sum(y.astype(compute_dtype(x, y)) / max(y.shape[0], 1), axis=0)
    return lax.stop_gradient(devices.summed(center) / devices.number)


def _centered_rows(x: jax.Array, center: jax.Array | None) -> Rows:
    assert center is not None
    x = x.astype(center.dtype) - center
    return Rows(x, jnp.sum(x * x, axis=-1))


def _negative_distances(x: Rows, y: Rows) -> jax.Array:
    assert x.factors is not None and y.factors is not None
    squares = x.factors[:, None] + y.factors[None, :] - 2 * products(x.values, y.values, lax.Precision.HIGHEST)
    coincide = squares <= 0  # False for NaN, which must stay NaN.
    return jnp.where(coincide, 0, -jnp.sqrt(jnp.where(coincide, 1, squares)))


def _longest(rows: Rows) -> jax.Array:
    values = rows.values.astype(compute_dtype(rows.values))
    return jnp.sqrt(jnp.max(jnp.sum(values**2, axis=-1), initial=0))


def _cosine_reach(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    return -jnp.ones_like(x), jnp.ones_like(y)


def _product_reach(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    return -x * y, x * y


def _distance_reach(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    return -(x + y), jnp.zeros_like(x)


def _plain_rows(x: jax.Array, _: jax.Array | None) -> Rows:
    return Rows(x.astype(compute_dtype(x)))


_STEPS: dict[Similarity, _Steps] = {
    cosine_similarity: _Steps(_unit_rows, _scaled_products, _cosine_reach),
    dot_product: _Steps(_plain_rows, _scaled_products, _product_reach),
    log1p_cosine_similarity: _Steps(_unit_rows, _log1p_products),
    negative_euclidean_distance: _Steps(_centered_rows, _negative_distances, _distance_reach, _center),
}
