"""The loss of one anchor, written once.

Everything here sees whole rows: the scores of some anchors against all of their candidates, divided by a temperature
only after differences were taken. With ``s`` an anchor's scores over its temperature, ``N`` the log-sum of its
negatives and ``p`` one of its positives, its terms are

=============  =========================================================================
``pair``       ``log(exp(s_p) + exp(N)) - s_p = softplus(N - s_p)``, for every ``p``
``all``        ``log(sum of all exp(s)) - s_p``, for every ``p``
``negatives``  ``N - s_p``, for every ``p``
``in``         ``log(sum of all exp(s)) - log(mean of positive exp(s))``, one term
=============  =========================================================================
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from ntxent_jax.numerics import LogSum, masked_log_sum, softplus
from ntxent_jax.pairs import PairMasks

Form = Literal["pair", "all", "negatives", "in"]


class Terms(NamedTuple):
    """The terms of each anchor's loss.

    Attributes:
        total: Their sum, in nats, shape ``[n]``; 0 for an anchor without terms.
        number: How many they are, shape ``[n]``, in the dtype of the total; 0 for an anchor that does not count.
    """

    total: jax.Array
    number: jax.Array


def row_terms(scores: jax.Array, masks: PairMasks, temperature: jax.Array, form: Form, one_positive: bool) -> Terms:
    """Terms of every anchor, from its scores ``[n, m]`` against all of its candidates.

    ``one_positive`` promises that no anchor has more than one positive. The forms differ only in what happens
    between several, and a single one needs no work on whole rows.
    """
    negatives = masked_log_sum(scores, masks.negative, temperature)
    count = jnp.sum(masks.positive, axis=-1).astype(scores.dtype)
    if form == "negatives":
        count = jnp.where(negatives.log_sum != -jnp.inf, count, 0)
    total = (_one_term if one_positive else _several_terms)(scores, masks.positive, negatives, temperature, form)
    return Terms(jnp.where(count > 0, total, 0), jnp.minimum(count, 1) if form == "in" else count)


def _one_term(
    scores: jax.Array, positive: jax.Array, negatives: LogSum, temperature: jax.Array, form: Form
) -> jax.Array:
    own = jnp.sum(jnp.where(positive, scores, 0), axis=-1)
    margin = (negatives.maximum - own) / temperature + negatives.log_sum
    return margin if form == "negatives" else softplus(margin)


def _several_terms(
    scores: jax.Array, positive: jax.Array, negatives: LogSum, temperature: jax.Array, form: Form
) -> jax.Array:
    if form in ("pair", "negatives"):
        differences = jnp.where(positive, negatives.maximum[:, None] - scores, 0) / temperature[:, None]
        margins = differences + negatives.log_sum[:, None]
        return jnp.sum(jnp.where(positive, margins if form == "negatives" else softplus(margins), 0), axis=-1)
    # log(sum of all) = P + softplus(N - P), with P the log-sum of the positives.
    positives = masked_log_sum(scores, positive, temperature)
    some = positives.log_sum != -jnp.inf
    log_sum = jnp.where(some, positives.log_sum, 0)
    rest = softplus((negatives.maximum - positives.maximum) / temperature + negatives.log_sum - log_sum)
    count = jnp.sum(positive, axis=-1).astype(scores.dtype)
    if form == "in":
        return jnp.where(some | (count == 0), rest + jnp.log(jnp.maximum(count, 1)), jnp.inf)
    spread = jnp.sum(jnp.where(positive, positives.maximum[:, None] - scores, 0), axis=-1) / temperature
    return spread + count * (log_sum + rest)
