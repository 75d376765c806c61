"""Scores and pairs of some anchors against all of their candidates, and what each anchor adds to a loss."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ntxent_jax.batch import Anchors, Candidates
from ntxent_jax.devices import ALONE, Devices
from ntxent_jax.formulas import Form, Only, Terms, Tile, row_terms
from ntxent_jax.numerics import divide_or_zero, divide_scores, picked
from ntxent_jax.pairs import OnlyAt, PairMasks, Place, Rule
from ntxent_jax.similarities import Similarity, compare, compare_own, factors_of

Reduction = Literal["mean", "anchor_mean", "sum", "none"]


class Options(NamedTuple):
    """What is decided before any array is seen.

    Attributes:
        rule: Which pairs are positives and negatives.
        similarity: Of two sets of rows.
        form: Of the terms of a loss.
        only: Where the only positive of each anchor stands, or "somewhere". None: there may be several.
        relative_margin: Whether the margin of a filter is a share of the positive's similarity.
        reduction: From the terms to the loss.
        block_size: Number of anchors visited at once, if the user chose it.
        precision: Of matrix products.
        devices: That hold the batch together.
    """

    rule: Rule
    similarity: Similarity
    form: Form = "pair"
    only: OnlyAt = None
    relative_margin: bool = False
    reduction: Reduction = "mean"
    block_size: int | None = None
    precision: str | None = None
    devices: Devices = ALONE


def tile(own: Anchors, others: Candidates, options: Options) -> Tile:
    """Some anchors against all of their candidates: those that all anchors share, then their own."""
    similarities, masks = _similarities_and_masks(own, others, options)
    if others.margin is not None:
        similarities, masks = _filtered(similarities, masks, own, others, others.margin, options)
    added, lowest, temperature = _added_logits(similarities, masks, own, others), -1 / own.temperature, own.temperature
    scores, level = similarities, None if own.own else others.level
    if added is not None:
        scores, level, temperature = divide_scores(scores, temperature) + added, None, logit_temperature(own, others)
    only, factors = _only(scores, masks, own, others, options), None
    if own.only is not None:
        factors = factors_of(options.similarity, own.rows, others.rows, options.precision)
    return Tile(scores, masks, temperature, lowest, only, level, factors)


def _similarities_and_masks(own: Anchors, others: Candidates, options: Options) -> tuple[jax.Array, PairMasks]:
    similarities, masks = compare(options.similarity, own.rows, others.rows), options.rule(own.members, others.members)
    if own.pair_where is not None:
        masks = PairMasks(masks.positive, masks.negative & own.pair_where)
    if own.own is not None and own.plain is not None:
        similarities = _beside(similarities, compare_own(options.similarity, own.plain, own.own.rows))
        positive, negative = own.own.where & own.own.positive, own.own.where & ~own.own.positive
        masks = PairMasks(_beside(masks.positive, positive), _beside(masks.negative, negative))
    return similarities, masks


def right_similarity(own: Anchors, others: Candidates, options: Options) -> jax.Array:
    """What :attr:`Anchors.right` is to these candidates: 0 if the positive is not among them."""
    similarities, masks = _similarities_and_masks(own, others, options)
    return jnp.sum(jnp.where(masks.positive, _guide(similarities, own, others, options), 0), axis=1)


def _only(scores: jax.Array, masks: PairMasks, own: Anchors, others: Candidates, options: Options) -> Only | None:
    """The only positive of each anchor, if it is known where among the candidates it stands."""
    if not isinstance(options.only, Place) or own.own is not None:
        return None
    place = options.only.among(own.members)
    exists = jnp.ones(place.shape, jnp.bool_) if others.members.where is None else others.members.where[place]
    score = picked(scores, masks.positive, place)
    if own.only is not None:
        # Its derivative without a look at all pairs, but its value from the same product as all others: at a low
        # temperature even their rounding must agree, so that equal rows are equally likely.
        score = own.only.score + lax.stop_gradient(score - own.only.score)
    return Only(score, exists)


def _guide(similarities: jax.Array, own: Anchors, others: Candidates, options: Options) -> jax.Array:
    """Similarities ``[n, m]`` that judge which negatives are false, ``-inf`` where nothing is known."""
    if own.guide is not None and others.guide is not None and others.guided is not None:
        known = jnp.where(others.guided, compare(options.similarity, own.guide, others.guide), -jnp.inf)
        unknown = similarities.shape[1] - known.shape[1]
        similarities = jnp.pad(known, ((0, 0), (0, unknown)), constant_values=-jnp.inf)
    return lax.stop_gradient(similarities)


def _filtered(
    similarities: jax.Array, masks: PairMasks, own: Anchors, others: Candidates, margin: jax.Array, options: Options
) -> tuple[jax.Array, PairMasks]:
    """Leave out negatives that a guide, or the batch itself, finds closer than the positive, less a margin."""
    guide = _guide(similarities, own, others, options)
    right = jnp.sum(jnp.where(masks.positive, guide, 0), axis=1) if own.right is None else own.right
    right = right[:, None]
    threshold = right - (jnp.abs(right) * margin if options.relative_margin else margin)
    # NaN is passed on, not taken for a verdict.
    unjudged = jnp.isnan(guide) | jnp.isnan(right) | jnp.isnan(margin)
    return jnp.where(unjudged, jnp.nan, similarities), PairMasks(masks.positive, masks.negative & ~(guide > threshold))


def _added_logits(similarities: jax.Array, masks: PairMasks, own: Anchors, others: Candidates) -> jax.Array | None:
    """What is added to the similarities over the temperature, or None."""
    added = None
    if others.bias is not None:
        added = jnp.broadcast_to(others.bias, (similarities.shape[0], others.bias.shape[0]))
        if own.own is not None and own.own.bias is not None:
            added = _beside(added, own.own.bias)
    if others.hardness is not None:
        harder = masks.negative & (similarities != -jnp.inf)
        harder = jnp.where(harder, others.hardness * lax.stop_gradient(jnp.where(harder, similarities, 0)), 0)
        added = harder if added is None else added + harder
    return added


def logit_temperature(own: Anchors, others: Candidates) -> jax.Array:
    """What the scores of a tile are still to be divided by: 1 if something was added to them as logits."""
    changed = others.bias is not None or others.hardness is not None
    return jnp.ones_like(own.temperature) if changed else own.temperature


def _beside(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.concatenate([x, y], axis=1)


def anchor_terms(own: Anchors, real: jax.Array, others: Candidates, options: Options) -> Terms:
    """What each of some anchors adds to the loss."""
    terms = row_terms(tile(own, others, options), options.form, options.only is not None, others.extras)
    return weighted(terms, own.weights, own.where & real, options.reduction)


def anchor_sum(own: Anchors, real: jax.Array, others: Candidates, options: Options) -> tuple[jax.Array, jax.Array]:
    """What some anchors add to the numerator of the loss, and each of them, times its weight, to the denominator."""
    terms = anchor_terms(own, real, others, options)
    return jnp.sum(terms.total), terms.number


def weighted(terms: Terms, weights: jax.Array, real: jax.Array, reduction: Reduction) -> Terms:
    """What each anchor adds to the numerator of a reduction, and, times its weight, to the denominator."""
    number = jnp.where(real, terms.number, 0)
    total = jnp.where(number > 0, terms.total, 0)
    if reduction in ("anchor_mean", "none"):
        total, number = divide_or_zero(total, number), jnp.minimum(number, 1)
    silent = (weights == 0) & jnp.isinf(total)  # A weight of 0 silences an infinite loss, but not NaN.
    return Terms(weights * jnp.where(silent, 0, total), number)


def matmul_precision(precision: str | None, rows: jax.Array) -> str | None:
    """Precision of matrix products. An accelerator may round factors to bfloat16, harmless only if they already are."""
    return "highest" if precision is None and rows.dtype != jnp.bfloat16 else precision
