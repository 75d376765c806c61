"""The loss of one anchor, written once.

With ``s`` the similarities of an anchor over its temperature, ``N`` the log-sum of its negatives, ``A`` that of all
of its candidates and ``p`` one of its positives, the terms of its loss are

=============  ===============================================================  ======================
form           terms                                                            number of terms
=============  ===============================================================  ======================
``pair``       ``log(exp(s_p) + exp(N)) - s_p``                                 one for every positive
``all``        ``A - s_p``                                                      one for every positive
``negatives``  ``N - s_p``                                                      one for every positive
``in``         ``A - log(mean of exp(s_p))``                                    one
``sigmoid``    sum of ``softplus(-s_p - bias)`` and ``softplus(s_n + bias)``    one
=============  ===============================================================  ======================

Scores are subtracted before they are divided by the temperature, and a log-sum is never added to its maximum, so that
neither large scores nor small losses lose digits.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from ntxent_jax.numerics import LogSum, divide_scores, masked_log_sum, softplus
from ntxent_jax.pairs import PairMasks

Form = Literal["pair", "all", "negatives", "in", "sigmoid"]

# Its exponential is finite in float32, and times any prior that matters it is more than 1.
_LARGE_LOGIT = 80


class Terms(NamedTuple):
    """The terms of each anchor's loss.

    Attributes:
        total: Their sum, in nats, shape ``[n]``; 0 for an anchor without terms.
        number: How many they are, shape ``[n]``, in the dtype of the total; 0 for an anchor that does not count.
    """

    total: jax.Array
    number: jax.Array


class Tile(NamedTuple):
    """Some anchors against all of their candidates; logits are ``scores / temperature``.

    Attributes:
        scores: Shape ``[n, m]``.
        masks: Positives and negatives, shape ``[n, m]``.
        temperature: Shape ``[n]``.
        lowest: Logit of a cosine of -1, shape ``[n]``.
    """

    scores: jax.Array
    masks: PairMasks
    temperature: jax.Array
    lowest: jax.Array


class Extras(NamedTuple):
    """Numbers that change a formula, each a scalar or, where it has no effect, None.

    Attributes:
        label_smoothing: Share of the target that is spread evenly over the candidates.
        class_prior: Share of the negatives that are positives in truth.
        sigmoid_bias: Added to the logits of the sigmoid form.
    """

    label_smoothing: jax.Array | None = None
    class_prior: jax.Array | None = None
    sigmoid_bias: jax.Array | None = None


class Sums(NamedTuple):
    """All that the loss of an anchor with one positive needs to know of its candidates, each of shape ``[n]``.

    Attributes:
        positive: Score of the positive.
        negatives: Log-sum of the negatives.
        number: Number of the negatives.
        total: Sum of the scores of the negatives.
    """

    positive: jax.Array
    negatives: LogSum
    number: jax.Array
    total: jax.Array


def row_terms(tile: Tile, form: Form, one_positive: bool, extras: Extras) -> Terms:
    """Terms of every anchor of a tile.

    ``one_positive`` promises that no anchor has more than one positive, which needs no work on whole rows.
    """
    if form == "sigmoid":
        return _sigmoid_terms(tile, extras)
    scores, (positive, negative), temperature, lowest = tile
    number = jnp.sum(positive, axis=-1).astype(scores.dtype)
    negatives = masked_log_sum(scores, negative, temperature)
    if form == "negatives":
        number = jnp.where(negatives.log_sum != -jnp.inf, number, 0)
    if one_positive:
        total = one_term(sums(scores, tile.masks, temperature), temperature, form, extras, lowest)
    else:
        total = _several_terms(tile, negatives, form)
    return Terms(jnp.where(number > 0, total, 0), jnp.minimum(number, 1) if form == "in" else number)


def one_term(of: Sums, temperature: jax.Array, form: Form, extras: Extras, lowest: jax.Array) -> jax.Array:
    """The term of every anchor that has one positive, shape ``[n]``; of no meaning for an anchor that has none."""
    excess = of.negatives.over(of.positive, temperature)
    if form == "negatives":
        return excess
    if extras.class_prior is not None:
        floor = lowest - of.positive / temperature
        return softplus(_debiased(excess, of.number, floor, extras.class_prior))
    loss = softplus(excess)
    if extras.label_smoothing is not None:
        # A - (1 - e) s_p - e mean(s) = (A - s_p) + e (s_p - mean(s)), the mean over the negatives and the positive.
        above_mean = (of.number * of.positive - of.total) / (of.number + 1) / temperature
        loss = loss + extras.label_smoothing * above_mean
    return loss


def sums(scores: jax.Array, masks: PairMasks, temperature: jax.Array) -> Sums:
    """Sums along the last axis."""
    return Sums(
        jnp.sum(jnp.where(masks.positive, scores, 0), axis=-1),
        masked_log_sum(scores, masks.negative, temperature),
        jnp.sum(masks.negative, axis=-1).astype(scores.dtype),
        jnp.sum(jnp.where(masks.negative, scores, 0), axis=-1),
    )


def _debiased(excess: jax.Array, number: jax.Array, floor: jax.Array, prior: jax.Array) -> jax.Array:
    """Log-sum of ``number`` negatives over the positive's logit, less what positives among them are expected to add.

    ``floor`` is the least that one negative can add.
    """
    some = number > 0
    log_number = jnp.log(jnp.where(some, number, 1))
    share = prior * jnp.exp(jnp.minimum(log_number - excess, _LARGE_LOGIT))
    all_of_it = share >= 1  # False for NaN, which must stay NaN.
    rest = excess - jnp.log1p(-prior) + jnp.log1p(-jnp.where(all_of_it, 0, share))
    return jnp.where(some, jnp.maximum(jnp.where(all_of_it, -jnp.inf, rest), log_number + floor), -jnp.inf)


def _several_terms(tile: Tile, negatives: LogSum, form: Form) -> jax.Array:
    scores, (positive, _), temperature, _ = tile
    if form in ("pair", "negatives"):
        own = jnp.where(positive, scores, negatives.maximum[:, None])
        excess = LogSum(*(part[:, None] for part in negatives)).over(own, temperature[:, None])
        return jnp.sum(jnp.where(positive, excess if form == "negatives" else softplus(excess), 0), axis=-1)
    # A = P + softplus(N - P), with P the log-sum of the positives.
    positives = masked_log_sum(scores, positive, temperature)
    some = positives.log_sum != -jnp.inf
    log_sum = jnp.where(some, positives.log_sum, 0)
    rest = softplus((negatives.maximum - positives.maximum) / temperature + negatives.log_sum - log_sum)
    number = jnp.sum(positive, axis=-1).astype(scores.dtype)
    if form == "in":
        return jnp.where(some | (number == 0), rest + jnp.log(jnp.maximum(number, 1)), jnp.inf)
    spread = jnp.sum(jnp.where(positive, positives.maximum[:, None] - scores, 0), axis=-1) / temperature
    return spread + number * (log_sum + rest)


def _sigmoid_terms(tile: Tile, extras: Extras) -> Terms:
    scores, (positive, negative), temperature, _ = tile
    logits = divide_scores(jnp.where(positive | negative, scores, 0), temperature)
    logits = logits if extras.sigmoid_bias is None else logits + extras.sigmoid_bias
    losses = softplus(jnp.where(positive, -logits, logits))
    number = jnp.any(positive, axis=-1).astype(scores.dtype)
    return Terms(jnp.sum(jnp.where(positive | negative, losses, 0), axis=-1), number)
