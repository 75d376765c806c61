"""Numbers that stay right at the edges: log-sums in two parts, safe quotients, unit rows at any scale.

Masks are boolean and applied twice, before and after the unsafe operation: a ``jnp.where`` after it hides a bad value,
only the one before it keeps the bad value's derivative from turning a gradient into NaN.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def compute_dtype(*arrays: jax.Array) -> np.dtype[np.floating]:
    """Dtype in which logits, sums and losses are computed: float32, or float64 if any of the arrays is."""
    return np.dtype(np.float64 if any(x.dtype == np.float64 for x in arrays) else np.float32)


class LogSum(NamedTuple):
    """Logarithm of a sum of exponentials, kept in two parts that must not be added too early.

    With scores ``s`` and temperature ``T`` it stands for ``log(sum(exp(s / T))) = maximum / T + log_sum``. At low
    temperature the first part is so large (1e8 against ln 3) that adding the second loses it. So take differences of
    scores first, which are exact where they are close, then divide by ``T``, then add ``log_sum``.

    Attributes:
        maximum: Largest score in the sum, shape ``[n]``, a constant for differentiation; 0 for an empty sum.
        log_sum: ``log(sum(exp((s - maximum) / T)))``, shape ``[n]``, at least 0; ``-inf`` for an empty sum.
    """

    maximum: jax.Array
    log_sum: jax.Array

    def over(self, scores: jax.Array, temperature: jax.Array) -> jax.Array:
        """``log(sum(exp(s / T))) - scores / T``, exact where the maximum and the scores are close."""
        return (self.maximum - scores) / temperature + self.log_sum


def masked_log_sum(scores: jax.Array, mask: jax.Array, temperature: jax.Array) -> LogSum:
    """Log-sum of ``scores / temperature`` along the last axis, over the entries where ``mask`` is True.

    A score of ``-inf`` adds nothing and has gradient 0; NaN and ``+inf`` make the result NaN. The derivative is the
    softmax, of every order, and exactly 0 where ``mask`` is False, whatever stands there.

    Args:
        scores: Shape ``[n, m]``.
        mask: Boolean, shape ``[n, m]``.
        temperature: Shape ``[n]``.
    """
    mask = mask & (scores != -jnp.inf)  # Not `>`, which NaN would fail.
    maximum = lax.stop_gradient(jnp.max(scores, axis=-1, initial=-jnp.inf, where=mask))
    some = maximum != -jnp.inf
    maximum = jnp.where(some, maximum, 0)
    shifted = jnp.where(mask, scores - maximum[:, None], 0) / temperature[:, None]
    total = jnp.sum(jnp.where(mask, jnp.exp(shifted), 0), axis=-1)
    return LogSum(maximum, jnp.where(some, jnp.log(jnp.where(some, total, 1)), -jnp.inf))


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
    some = maximum != -jnp.inf
    maximum = jnp.where(some, maximum, 0)
    shifted = jnp.where(mask, scores - maximum[segment], 0) / temperature[segment]
    total = jax.ops.segment_sum(jnp.where(mask, jnp.exp(shifted), 0), segment, n)
    return LogSum(maximum, jnp.where(some, jnp.log(jnp.where(some, total, 1)), -jnp.inf))


def grown_log_sum(a: LogSum, b: LogSum, temperature: jax.Array) -> LogSum:
    """Log-sum over two disjoint sets of scores."""
    maximum = jnp.maximum(*(jnp.where(part.log_sum != -jnp.inf, part.maximum, -jnp.inf) for part in (a, b)))
    some = maximum != -jnp.inf
    maximum = jnp.where(some, maximum, 0)
    shifted = [jnp.where(part.log_sum != -jnp.inf, part.maximum - maximum, 0) for part in (a, b)]
    logits = [x / temperature + part.log_sum for x, part in zip(shifted, (a, b), strict=True)]
    return LogSum(maximum, jnp.where(some, jnp.logaddexp(*(jnp.where(some, x, 0) for x in logits)), -jnp.inf))


@jax.custom_jvp
def softplus(x: jax.Array) -> jax.Array:
    """``log(1 + exp(x))``: 0 at ``-inf``, relative error near eps for every ``x``.

    ``jax.nn.softplus`` with half of its work: one logistic function is its derivative.
    """
    return jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x)))


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
