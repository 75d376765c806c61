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
from jax import lax

from ntxent_jax.numerics import Factors, Level, LogSum, log_of_sum, masked_log_sum, softplus
from ntxent_jax.pairs import PairMasks

Form = Literal["pair", "all", "negatives", "in", "sigmoid"]
Linear = tuple[jax.Array, ...]

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


class Only(NamedTuple):
    """The one positive that an anchor may have, where it is known without a look at all pairs.

    Attributes:
        score: Its score, shape ``[n]``; of no meaning where there is none.
        exists: Boolean, shape ``[n]``.
    """

    score: jax.Array
    exists: jax.Array


class Tile(NamedTuple):
    """Some anchors against all of their candidates; logits are ``scores / temperature``.

    Attributes:
        scores: Shape ``[n, m]``.
        masks: Positives and negatives, shape ``[n, m]``.
        temperature: Shape ``[n]``.
        lowest: Logit of a cosine of -1, shape ``[n]``.
        only: The positive of each anchor, if it can have but one and that is known; else None.
        level: Of the scores, or None.
        factors: Of the scores, or None.
    """

    scores: jax.Array
    masks: PairMasks
    temperature: jax.Array
    lowest: jax.Array
    only: Only | None = None
    level: Level | None = None
    factors: Factors | None = None


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


class Negatives(NamedTuple):
    """All that the loss of an anchor needs to know of its negatives, each of shape ``[n]``.

    Attributes:
        log_sum: Log-sum of their scores.
        number: How many they are.
        total: Sum of their scores.
    """

    log_sum: LogSum
    number: jax.Array
    total: jax.Array


class Positives(NamedTuple):
    """All that the loss of an anchor needs to know of several positives, each of shape ``[n]``.

    Attributes:
        log_sum: Log-sum of their scores.
        number: How many they are.
        below: Sum of what they lie below the maximum of the log-sum.
    """

    log_sum: LogSum
    number: jax.Array
    below: jax.Array


class Sums(NamedTuple):
    """All that the loss of an anchor needs to know of some candidates, except for terms of form ``pair``.

    Attributes:
        negatives: Of the anchors.
        positives: Of anchors that may have several, or None.
        only: The positive of anchors that have but one, or None.
    """

    negatives: Negatives
    positives: Positives | None = None
    only: Only | None = None


def row_terms(tile: Tile, form: Form, one_positive: bool, extras: Extras) -> Terms:
    """Terms of every anchor of a tile.

    ``one_positive`` promises that no anchor has more than one positive, which needs no work on whole rows.
    """
    if form == "sigmoid":
        return _sigmoid_terms(tile, extras)
    sums = sums_of(tile, form, one_positive)
    pairs = pairs_of(tile, sums.negatives.log_sum) if form == "pair" and not one_positive else None
    return terms_of(sums, pairs, tile.temperature, tile.lowest, form, extras)


def sums_of(tile: Tile, form: Form, one_positive: bool) -> Sums:
    """What the candidates of a tile add up to."""
    scores, masks, temperature, _, only, level, factors = tile
    negatives = negatives_of(scores, masks.negative, temperature, level=level, factors=factors)
    if one_positive:
        return Sums(negatives, only=only or only_positive(scores, masks.positive))
    return Sums(negatives, None if form == "pair" else positives_of(scores, masks.positive, temperature, level))


def pairs_of(tile: Tile, negatives: LogSum) -> Terms:
    """Terms of form ``pair`` with the positives of a tile, given the log-sum of all negatives."""
    positive = tile.masks.positive
    total = pair_terms(tile.scores, positive, negatives, tile.temperature)
    return Terms(total, number_of(positive, tile.scores.dtype))


def terms_of(
    sums: Sums, pairs: Terms | None, temperature: jax.Array, lowest: jax.Array, form: Form, extras: Extras
) -> Terms:
    """Terms of every anchor, from sums over all of its candidates, or from its terms of form ``pair``."""
    negatives, positives, only = sums
    if only is not None:
        total = one_term(only.score, negatives, temperature, form, extras, lowest)
        number = only.exists.astype(total.dtype)
    elif positives is not None:
        total, number = several_terms(positives, negatives.log_sum, temperature, form), positives.number
    else:
        assert pairs is not None
        total, number = pairs
    return counted(total, number, negatives.log_sum, form)


def counted(total: jax.Array, number: jax.Array, negatives: LogSum, form: Form) -> Terms:
    """Terms of anchors that have ``number`` positives: none for those that do not count."""
    if form == "negatives":
        number = jnp.where(negatives.log_sum != -jnp.inf, number, 0)
    return Terms(jnp.where(number > 0, total, 0), jnp.minimum(number, 1) if form == "in" else number)


def one_term(
    positive: jax.Array, negatives: Negatives, temperature: jax.Array, form: Form, extras: Extras, lowest: jax.Array
) -> jax.Array:
    """The term of every anchor that has one positive, shape ``[n]``; of no meaning for an anchor that has none."""
    excess = negatives.log_sum.over(positive, temperature)
    if form == "negatives":
        return excess
    if extras.class_prior is not None:
        floor = lowest - positive / temperature
        return softplus(_debiased(excess, negatives.number, floor, extras.class_prior))
    loss = softplus(excess)
    if extras.label_smoothing is not None:
        # A - (1 - e) s_p - e mean(s) = (A - s_p) + e (s_p - mean(s)), the mean over the negatives and the positive.
        above_mean = (negatives.number * positive - negatives.total) / (negatives.number + 1) / temperature
        loss = loss + extras.label_smoothing * above_mean
    return loss


def pair_terms(
    scores: jax.Array, positive: jax.Array, negatives: LogSum, temperature: jax.Array, axis: int = 1
) -> jax.Array:
    """Sum of the terms of form ``pair`` over the positives ``[n, m]`` along an axis."""
    maximum, log_sum, temperature = (jnp.expand_dims(x, axis) for x in (*negatives, temperature))
    excess = LogSum(maximum, log_sum).over(jnp.where(positive, scores, maximum), temperature)
    return jnp.sum(jnp.where(positive, softplus(excess), 0), axis)


def several_terms(positives: Positives, negatives: LogSum, temperature: jax.Array, form: Form) -> jax.Array:
    """Sum of the terms of every anchor in the other forms, shape ``[n]``; of no meaning for one without positives."""
    (highest, log_sum), number, below = positives
    some = log_sum != -jnp.inf
    if form == "negatives":
        return number * negatives.over(highest, temperature) + below / temperature
    # A = P + softplus(N - P), with P the log-sum of the positives.
    log_sum = jnp.where(some, log_sum, 0)
    rest = softplus(negatives.over(highest, temperature) - log_sum)
    if form == "in":
        return jnp.where(some, rest + jnp.log(jnp.maximum(number, 1)), jnp.inf)
    return below / temperature + number * (log_sum + rest)


def negatives_of(
    scores: jax.Array,
    mask: jax.Array,
    temperature: jax.Array,
    level: Level | None = None,
    factors: Factors | None = None,
) -> Negatives:
    """What anchors need to know of their negatives ``[n, m]``."""
    log_sum = masked_log_sum(scores, mask, temperature, level, factors)
    return Negatives(log_sum, number_of(mask, scores.dtype), jnp.sum(jnp.where(mask, scores, 0), axis=1))


def positives_of(scores: jax.Array, mask: jax.Array, temperature: jax.Array, level: Level | None = None) -> Positives:
    """What anchors need to know of their positives ``[n, m]``."""
    log_sum = masked_log_sum(scores, mask, temperature, level)
    below = jnp.sum(jnp.where(mask, log_sum.maximum[:, None] - scores, 0), axis=1)
    return Positives(log_sum, number_of(mask, scores.dtype), below)


def only_positive(scores: jax.Array, mask: jax.Array) -> Only:
    """The one positive of each anchor, found among all pairs."""
    return Only(jnp.sum(jnp.where(mask, scores, 0), axis=1), jnp.any(mask, axis=1))


def number_of(mask: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """How many entries of each row of ``[n, m]`` are True, as floating numbers."""
    return jnp.sum(mask, axis=1, dtype=jnp.int32).astype(dtype)


def added(x: Sums, y: Sums, temperature: jax.Array) -> Sums:
    """Sums over two sets of candidates together."""
    levels = levels_of(x, y)
    parts = (linear(sums, levels, temperature) for sums in (x, y))
    return from_linear(jax.tree.map(jnp.add, *parts), levels, x.only is not None)


def levels_of(*several: Sums) -> tuple[jax.Array, ...]:
    """A score near the largest of the negatives, and of the positives if they are summed; 0 where there are none."""
    highest = [
        jnp.stack([jnp.where(x.log_sum.log_sum != -jnp.inf, x.log_sum.maximum, -jnp.inf) for x in same])
        for same in (
            [sums.negatives for sums in several],
            [sums.positives for sums in several if sums.positives is not None],
        )
        if same
    ]
    levels = (lax.stop_gradient(jnp.max(x, axis=0)) for x in highest)
    return tuple(jnp.where(level != -jnp.inf, level, 0) for level in levels)


def linear(sums: Sums, levels: tuple[jax.Array, ...], temperature: jax.Array) -> Linear:
    """Numbers that are sums over candidates, exponentials being measured from a level for each log-sum."""
    (log_sum, number, total), positives, only = sums
    result = [log_sum.above(levels[0], temperature), number, total]
    if positives is not None:
        log_sum, number, below = positives
        result += [log_sum.above(levels[1], temperature), number, below + number * (levels[1] - log_sum.maximum)]
    if only is not None:
        result += [only.score, only.exists.astype(only.score.dtype)]
    return tuple(result)


def from_linear(numbers: Linear, levels: tuple[jax.Array, ...], one_positive: bool) -> Sums:
    """The inverse of :func:`linear`."""
    negatives = Negatives(log_of_sum(levels[0], numbers[0]), *numbers[1:3])
    if one_positive:
        score, number = numbers[3:]
        return Sums(negatives, only=Only(score, number > 0))
    positives = None if len(levels) == 1 else Positives(log_of_sum(levels[1], numbers[3]), *numbers[4:])
    return Sums(negatives, positives)


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


def _sigmoid_terms(tile: Tile, extras: Extras) -> Terms:
    scores, (positive, negative), temperature, *_ = tile
    # A score of -inf is a logit of -inf: no loss of a negative, an infinite one of a positive.
    absent = scores == -jnp.inf
    some = (positive | negative) & ~absent
    logits = jnp.where(some, scores, 0) / temperature[:, None]
    logits = logits if extras.sigmoid_bias is None else logits + extras.sigmoid_bias
    losses = jnp.where(some, softplus(jnp.where(positive, -logits, logits)), 0)
    lost = jnp.where(jnp.any(positive & absent, axis=-1), jnp.inf, 0)
    return Terms(jnp.sum(losses, axis=-1) + lost, jnp.any(positive, axis=-1).astype(scores.dtype))
