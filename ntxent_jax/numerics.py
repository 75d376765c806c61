"""Numbers that stay right at the edges: log-sums in two parts, safe quotients, unit rows at any scale.

Masks are boolean and applied twice, before and after the unsafe operation: a ``jnp.where`` after it hides a bad value,
only the one before it keeps the bad value's derivative from turning a gradient into NaN.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero


def compute_dtype(*arrays: jax.Array) -> np.dtype[np.floating]:
    """Dtype in which logits, sums and losses are computed: float32, or float64 if any of the arrays is."""
    return np.dtype(np.float64 if any(x.dtype == np.float64 for x in arrays) else np.float32)


class LogSum(NamedTuple):
    """Logarithm of a sum of exponentials, kept in two parts that must not be added too early.

    With scores ``s`` and temperature ``T`` it stands for ``log(sum(exp(s / T))) = maximum / T + log_sum``. At low
    temperature the first part is so large (1e8 against ln 3) that adding the second loses it. So take differences of
    scores first, which are exact where they are close, then divide by ``T``, then add ``log_sum``.

    Attributes:
        maximum: Largest score in the sum, or one near it, shape ``[n]``, a constant for differentiation; 0 for an
            empty sum.
        log_sum: ``log(sum(exp((s - maximum) / T)))``, shape ``[n]``; ``-inf`` for an empty sum.
    """

    maximum: jax.Array
    log_sum: jax.Array

    def over(self, scores: jax.Array, temperature: jax.Array) -> jax.Array:
        """``log(sum(exp(s / T))) - scores / T``, exact where the maximum and the scores are close."""
        return (self.maximum - scores) / temperature + self.log_sum

    def above(self, level: jax.Array, temperature: jax.Array) -> jax.Array:
        """``sum(exp((s - level) / T))``, which can be added to another such sum: see :func:`log_of_sum`."""
        some = self.log_sum != -jnp.inf
        shifted = jnp.where(some, self.maximum - level, 0) / temperature
        return jnp.where(some, jnp.exp(jnp.where(some, self.log_sum, 0) + shifted), 0)


class Level(NamedTuple):
    """A score in the middle of all, and whether none lies so far from it that its exponential leaves the dtype's range.

    Then ``exp((s - middle) / T)`` of many rows may be added up without looking for their maxima first.

    Attributes:
        middle: Scalar, a constant for differentiation.
        moderate: Boolean, scalar. False if any number is NaN.
    """

    middle: jax.Array
    moderate: jax.Array


class Factors(NamedTuple):
    """Rows whose products are scores.

    Attributes:
        left: Shape ``[n, d]``.
        right: Shape ``[m, d]``.
        precision: Of their product.
    """

    left: jax.Array
    right: jax.Array
    precision: str | None


def level_of(lowest: jax.Array, highest: jax.Array, temperature: jax.Array) -> Level:
    """Level of scores between ``lowest`` and ``highest`` at temperatures of any shape."""
    lowest, highest, temperature = lax.stop_gradient((lowest, highest, temperature))
    # exp(66) in float32: sums of a thousand million such exponentials, and their reciprocals, are normal numbers.
    limit = 0.75 * float(np.log(np.finfo(temperature.dtype).max))
    return Level((lowest + highest) / 2, jnp.all((highest - lowest) / 2 <= limit * temperature))


def masked_log_sum(
    scores: jax.Array,
    mask: jax.Array,
    temperature: jax.Array,
    level: Level | None = None,
    factors: Factors | None = None,
) -> LogSum:
    """Log-sums of ``scores / temperature`` of every row, over the entries where ``mask`` is True.

    A score of ``-inf`` adds nothing and has gradient 0; NaN and ``+inf`` make the result NaN. The derivative is the
    softmax, of every order, and exactly 0 where ``mask`` is False, whatever stands there.

    Args:
        scores: Shape ``[n, m]``.
        mask: Boolean, shape ``[n, m]``.
        temperature: Shape ``[n]``.
        level: Of these scores, if known: it takes the place of the maximum, which costs a pass over all of them.
        factors: Of these scores, if known: they make the derivative cheaper.
    """
    if level is None:
        mask = mask & (scores != -jnp.inf)  # Not `>`, which NaN would fail.

    def largest() -> jax.Array:
        return jnp.max(lax.stop_gradient(scores), axis=1, initial=-jnp.inf, where=mask)

    if level is None:
        maximum = largest()
    else:
        middle = jnp.broadcast_to(level.middle, temperature.shape)
        # Added to nothing, that of no scores at all is of one type with the level on every device.
        maximum = lax.cond(level.moderate, lambda: middle, lambda: largest() + jnp.zeros_like(middle))
    maximum = jnp.where(maximum != -jnp.inf, maximum, 0)
    if factors is not None:
        left, right, precision = factors
        return log_of_sum(maximum, _sums_of_exp(left, right, mask, maximum, temperature, precision))
    return log_of_sum(maximum, jnp.sum(exps(scores, mask, maximum[:, None], temperature[:, None]), axis=1))


def exps(scores: jax.Array, mask: jax.Array, maximum: jax.Array, temperature: jax.Array) -> jax.Array:
    """``exp((scores - maximum) / temperature)``, exactly 0 and with gradient 0 where ``mask`` is False."""
    # The flags are 0 where they are chosen. JAX would take a constant 0 out of loops, as an array that each pass reads.
    shifted = jnp.where(mask, scores - maximum, mask.astype(scores.dtype))
    return masked_exp(shifted / temperature, mask)


@partial(jax.custom_jvp, nondiff_argnums=(5,))
def _sums_of_exp(
    left: jax.Array,
    right: jax.Array,
    mask: jax.Array,
    maximum: jax.Array,
    temperature: jax.Array,
    precision: str | None,
) -> jax.Array:
    """Sums of exponentials over all products of a row of ``left``, less ``maximum``, over the temperature.

    JAX would scale the ``[n, m]`` exponentials by the derivative of each row's sum before it multiplies them with rows
    of ``right``. Here the rows of the product are scaled, ``[n, d]``. The maximum is a constant.
    """
    scores = products(left, right, precision)
    return jnp.sum(exps(scores, mask, maximum[:, None], temperature[:, None]), axis=1)


@partial(_sums_of_exp.defjvp, symbolic_zeros=True)
def _sums_of_exp_jvp(precision: str | None, primals: tuple[jax.Array, ...], tangents: tuple[Any, ...]) -> Any:
    left, right, mask, maximum, temperature = primals
    of_left, of_right, _, _, of_temperature = tangents
    entries = exps(products(left, right, precision), mask, maximum[:, None], temperature[:, None])
    total = jnp.sum(entries, axis=1)
    weighted = jnp.matmul(entries, right, precision=precision)
    moved = jnp.zeros_like(total)
    if not isinstance(of_left, SymbolicZero):
        moved += jnp.sum(weighted * of_left, axis=1)
    if not isinstance(of_right, SymbolicZero):
        moved += jnp.sum(left * jnp.matmul(entries, of_right, precision=precision), axis=1)
    if not isinstance(of_temperature, SymbolicZero):
        moved -= (jnp.sum(weighted * left, axis=1) - maximum * total) * of_temperature / temperature
    return total, moved / temperature


def products(x: jax.Array, y: jax.Array, precision: str | lax.Precision | None = None) -> jax.Array:
    """``x @ y.T``, without a transpose, of which XLA would keep a copy."""
    return lax.dot_general(x, y, (((1,), (1,)), ((), ())), precision=precision)


@jax.custom_jvp
def masked_exp(x: jax.Array, mask: jax.Array) -> jax.Array:
    """``exp(x)``, exactly 0 and with gradient 0 where ``mask`` is False.

    It must be finite there, which whoever calls this has seen to. Then a product does what else takes a ``jnp.where``.
    """
    return jnp.exp(x) * mask.astype(x.dtype)


@masked_exp.defjvp
def _masked_exp_jvp(primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    entries = masked_exp(*primals)
    return entries, entries * tangents[0]


def log_of_sum(maximum: jax.Array, total: jax.Array) -> LogSum:
    """Log-sum whose second part is still a sum of exponentials; an empty one is 0."""
    some = total != 0
    return LogSum(jnp.where(some, maximum, 0), jnp.where(some, jnp.log(jnp.where(some, total, 1)), -jnp.inf))


@jax.custom_jvp
def picked(scores: jax.Array, mask: jax.Array, place: jax.Array) -> jax.Array:
    """The score at a place in each row of ``[n, m]``, which is the only one where ``mask`` may be True.

    Value from the place, derivative through the mask, so that neither takes another pass over all scores.
    """
    return jnp.take_along_axis(scores, place[:, None], axis=1, mode="clip")[:, 0]


@picked.defjvp
def _picked_jvp(primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    return picked(*primals), jnp.sum(jnp.where(primals[1], tangents[0], 0), axis=1)


def divide_scores(scores: jax.Array, temperature: jax.Array) -> jax.Array:
    """``scores / temperature`` with a temperature for each row, and gradient 0 for a score of ``-inf``."""
    absent = scores == -jnp.inf
    return jnp.where(absent, -jnp.inf, jnp.where(absent, 0, scores) / temperature[:, None])


def segment_log_sum(scores: jax.Array, mask: jax.Array, segment: jax.Array, temperature: jax.Array) -> LogSum:
    """Log-sums of scores ``[p]`` that belong to segments, with a temperature for each segment ``[n]``.

    As :func:`masked_log_sum`; a segment out of range must be masked.
    """
    mask = mask & (scores != -jnp.inf)
    n, segment = temperature.shape[0], jnp.where(mask, segment, 0)
    maximum = jax.ops.segment_max(jnp.where(mask, lax.stop_gradient(scores), -jnp.inf), segment, n)
    maximum = jnp.where(maximum != -jnp.inf, maximum, 0)
    shifted = jnp.where(mask, scores - maximum[segment], 0) / temperature[segment]
    return log_of_sum(maximum, jax.ops.segment_sum(masked_exp(shifted, mask), segment, n))


@jax.custom_jvp
def softplus(x: jax.Array) -> jax.Array:
    """``log(1 + exp(x))``: 0 at ``-inf``, relative error near eps for every ``x``.

    ``jax.nn.softplus`` with less than half of its work: one logistic function is its derivative, and in float32 a
    polynomial its logarithm, which takes XLA's CPU as long as two exponentials.
    """
    small = jnp.exp(-jnp.abs(x))
    if x.dtype != jnp.float32:
        return jnp.maximum(x, 0) + jnp.log1p(small)
    # log(1 + e) = 2 artanh(z) = 2 (z + z^3 / 3 + z^5 / 5 + ...) with z = e / (2 + e), at most 1/3.
    z = small / (2 + small)
    series, square = jnp.zeros_like(z), z * z
    for k in reversed(range(8)):
        series = series * square + 1 / (2 * k + 1)
    return jnp.maximum(x, 0) + 2 * z * series


@softplus.defjvp
def _softplus_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return softplus(primals[0]), tangents[0] * jax.nn.sigmoid(primals[0])


def divide_or_zero(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """``numerator / denominator``, and 0 with gradient 0 where the denominator is 0."""
    some = denominator != 0
    return jnp.where(some, numerator / jnp.where(some, denominator, 1), 0)


def divide_or_nan(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """``numerator / denominator``, and NaN where the denominator is 0: the mean over nothing."""
    return jnp.where(denominator != 0, divide_or_zero(numerator, denominator), jnp.nan)


def power_of_two_scale(x: jax.Array) -> jax.Array:
    """Power of two that brings the largest absolute value of each row near 1, shape ``[..., 1]``; 1 for a zero row.

    Multiplying by it is exact, so squares neither overflow nor underflow and the row keeps its direction to the last
    bit. A constant for differentiation.
    """
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True, initial=0)
    exponent = jnp.frexp(lax.stop_gradient(largest))[1]
    limit = -np.finfo(x.dtype).minexp  # 2**limit and 2**-limit are both normal numbers, which no backend flushes to 0.
    return jnp.ldexp(jnp.ones_like(largest), -jnp.clip(exponent, -limit, limit))


def inverse_norm(x: jax.Array) -> jax.Array:
    """``1 / |x|`` of each row, shape ``[..., 1]``; 0 with gradient 0 for a zero row. Rows must be near unit scale."""
    square = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
    some = square != 0
    return jnp.where(some, 1 / jnp.sqrt(jnp.where(some, square, 1)), 0)


def unit_rows(x: jax.Array) -> jax.Array:
    """Rows ``[..., d]`` at unit length, at any scale; a zero row stays, with gradient 0."""
    scaled = x * power_of_two_scale(x)
    return scaled * inverse_norm(scaled)
