"""Losses in which rows choose among each other, run on tiles that serve both of their sides."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ntxent_jax.batch import Anchors, Batch, Candidates
from ntxent_jax.engine import rows_per_block, sum_over_rows
from ntxent_jax.formulas import Extras, Negatives, Only, Positives, Sums, Terms, pair_terms, terms_of
from ntxent_jax.numerics import level_of, log_of_sum, masked_exp
from ntxent_jax.pairs import Members, PairMasks, only_negatives
from ntxent_jax.ring import ring_sum
from ntxent_jax.scores import Options, anchor_sum, matmul_precision, weighted
from ntxent_jax.similarities import Rows, compare, compare_each, has_range, score_range
from ntxent_jax.two_sided import (
    Inputs,
    Layout,
    Meet,
    Part,
    Steps,
    added_up,
    among_themselves,
    between,
    in_order,
    in_strides,
    passed_around,
    sum_both_ways,
)

# Rows and entries of a tile. Smaller ones make small, slow matrix products; larger ones leave the caches, and more of
# them can hold positives. Powers of two are slow, their rows fall on the same lines of a cache: at 8,192 rows of 128
# features 240 x 2,185 took 117 ms, 256 x 2,048 took 161, best and worst of 64 to 1,024 rows and half to four million.
_ROWS, _ENTRIES = 240, 1 << 19


class Met(NamedTuple):
    """Rows that meet each other, and who they are."""

    rows: Rows
    members: Members


class Numbers(NamedTuple):
    """What all tiles share."""

    temperature: jax.Array
    middle: jax.Array


class Rest(NamedTuple):
    """What turns sums into a loss."""

    numbers: Numbers
    weights: jax.Array
    where: jax.Array
    only: Only | None
    extras: Extras


def is_coupled(batch: Batch, options: Options) -> bool:
    """Whether the loss is run here: each pair counts in the same way for both rows, at one temperature.

    Not where a jitted program may be split over devices, each of which would have to see most of every tile's columns.
    """
    devices = options.devices
    if not devices.ring and (devices.axis is not None or jax.device_count() > 1):
        return False
    one_sided = (batch.bias, batch.pair_where, batch.own, batch.filter, batch.hardness, batch.extras.class_prior)
    bounded = has_range(options.similarity)
    return bounded and batch.temperature.ndim == 0 and all(option is None for option in one_sided)


def coupled_sum(
    batch: Batch, anchors: Anchors, candidates: Candidates, options: Options
) -> tuple[jax.Array, jax.Array]:
    """Sum of the weighted terms of a streamed loss, and the number that each anchor adds to the count.

    Of anchors among themselves, or, given candidates, the mean of both directions.
    """
    options = options._replace(precision=matmul_precision(options.precision, batch.anchors))
    n, sets = anchors.where.shape[0], 1 if batch.candidates is None else 2
    both = (anchors.rows, anchors.members), (candidates.rows, candidates.members)
    rows = tuple(Met(x, members._replace(where=anchors.where)) for x, members in both[:sets])
    temperature = jnp.where(batch.temperature > 0, batch.temperature, jnp.nan).astype(anchors.weights.dtype)
    level = level_of(*score_range(options.similarity, anchors.rows, candidates.rows, options.devices), temperature)
    numbers = Numbers(temperature, level.middle)
    only = None if options.only is None else _only(anchors, candidates, sets, options)
    weights, where = (jnp.tile(x, sets) for x in (anchors.weights / sets, anchors.where))
    inputs = Inputs(rows, numbers, Rest(numbers, weights, where, only, candidates.extras))
    block = rows_per_block(n, n, options.block_size or _ROWS)
    blocks, most, devices = -(-n // block), max(1, _ENTRIES // block**2), options.devices
    if devices.ring:
        meet: Meet = partial(passed_around, sets=sets, most=most, devices=devices)
    else:
        meet = partial(added_up, schedule=among_themselves(blocks, most) if sets == 1 else between(blocks, most))
    steps = _steps(options, batch.extras.label_smoothing is not None)
    layout = partial(_layout, block=block, by_label=options.only is None)
    otherwise = partial(_row_by_row, options=options)
    total, numbers_of_rows = sum_both_ways(steps, otherwise, layout, meet, level.moderate, inputs)
    return total, numbers_of_rows[:n]


def _only(anchors: Anchors, candidates: Candidates, sets: int, options: Options) -> Only:
    """The one positive of every row, found without a look at all pairs."""
    if sets == 2:
        score, exists = compare_each(options.similarity, anchors.rows, candidates.rows), anchors.where
        return Only(jnp.tile(score, 2), jnp.tile(exists, 2))
    first, second = (jax.tree.map(lambda x, i=i: x[i::2], anchors.rows) for i in (0, 1))
    return Only(jnp.repeat(compare_each(options.similarity, first, second), 2), anchors.where)


def _layout(rows: tuple[Met, ...], *, block: int, by_label: bool) -> Layout:
    """Rows in runs of equal labels, so that only tiles near the diagonal can hold positives; as they are otherwise."""
    if by_label:
        return in_order(jnp.argsort(rows[0].members.label), block)
    return in_strides(rows[0].members.label.shape[0], block, len(rows))


def _steps(options: Options, smoothed: bool) -> Steps:
    return Steps(
        partial(_sums_of_tile, options=options, smoothed=smoothed),
        partial(_terms_of_tile, options=options) if options.only is None and options.form == "pair" else None,
        None if options.only is not None else _may_hold_positives,
        partial(_finish, options=options),
    )


def _may_hold_positives(part: Part) -> jax.Array:
    own, others = part.own.members.label, part.others.members.label
    return (jnp.min(own) <= jnp.max(others)) & (jnp.min(others) <= jnp.max(own))


def _scores_and_masks(part: Part, options: Options, positives: bool) -> tuple[jax.Array, PairMasks]:
    own, others = part.own, part.others
    with jax.default_matmul_precision(options.precision):
        scores = compare(options.similarity, own.rows, others.rows)
    rule = options.rule if positives or options.only is not None else only_negatives
    masks = rule(own.members, others.members)
    asked = part.rows[None, :] & own.members.where[:, None]
    return scores, PairMasks(masks.positive & asked, masks.negative & asked)


def _both_sides(entries: jax.Array, part: Part) -> tuple[jax.Array, jax.Array]:
    """Sums of a tile's entries for its rows and for its columns."""
    return jnp.sum(entries, axis=1), jnp.where(part.columns, jnp.sum(entries, axis=0), 0)


def _sums_of_tile(
    part: Part, numbers: Numbers, positives: bool, *, options: Options, smoothed: bool
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Sums over negatives, then over positives, of what the form asks for: see :func:`_finish`."""
    scores, masks = _scores_and_masks(part, options, positives)
    logits = (scores - numbers.middle) / numbers.temperature
    entries = [masked_exp(logits, masks.negative)]
    if smoothed:
        entries += [masks.negative.astype(scores.dtype), jnp.where(masks.negative, scores, 0)]
    if options.only is None and options.form != "pair":
        below = jnp.where(masks.positive, numbers.middle - scores, 0)
        several = [masked_exp(logits, masks.positive), masks.positive.astype(scores.dtype), below]
        entries += several if positives else [jnp.zeros_like(scores[:1, :1])] * 3
    shape = scores.shape
    rows, columns = zip(*(_both_sides(jnp.broadcast_to(x, shape), part) for x in entries), strict=True)
    return rows, columns


def _terms_of_tile(
    part: Part, numbers: Numbers, own: tuple[jax.Array], others: tuple[jax.Array], *, options: Options
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """Terms of form ``pair`` and how many, given the sums over all negatives."""
    scores, (positive, _) = _scores_and_masks(part, options, True)

    def terms(sums: tuple[jax.Array], axis: int) -> jax.Array:
        negatives = log_of_sum(jnp.broadcast_to(numbers.middle, sums[0].shape), sums[0])
        return pair_terms(scores, positive, negatives, jnp.broadcast_to(numbers.temperature, sums[0].shape), axis)

    number = _both_sides(positive.astype(scores.dtype), part)
    return (terms(own, 1), number[0]), (jnp.where(part.columns, terms(others, 0), 0), number[1])


def _finish(
    sums_of_sets: tuple[tuple[jax.Array, ...], ...],
    terms_of_sets: tuple[tuple[jax.Array, jax.Array] | None, ...],
    rest: Rest,
    *,
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """The sum of all weighted terms, and the number that each row adds to the count."""
    sums, terms = (jax.tree.map(lambda *x: jnp.concatenate(x), *sets) for sets in (sums_of_sets, terms_of_sets))
    shape, form = sums[0].shape, options.form
    temperature, middle = (jnp.broadcast_to(x, shape) for x in rest.numbers)
    negatives, positives = log_of_sum(middle, sums[0]), None
    if rest.only is not None:
        known = Negatives(negatives, *(sums[1:] or (sums[0], sums[0])))
    else:
        known = Negatives(negatives, sums[0], sums[0])
        positives = None if terms is not None else Positives(log_of_sum(middle, sums[1]), sums[2], sums[3])
    pairs = None if terms is None else Terms(*terms)
    result = terms_of(Sums(known, positives, rest.only), pairs, temperature, -1 / temperature, form, rest.extras)
    result = weighted(result, rest.weights, rest.where, options.reduction)
    return jnp.sum(result.total), result.number


def _row_by_row(inputs: Inputs, *, options: Options) -> tuple[jax.Array, jax.Array]:
    """The same loss for scores of any size: every row against its candidates, one direction after the other."""
    rows, numbers, rest = inputs
    total, counts = jnp.zeros_like(numbers.temperature), list[jax.Array]()
    for own, others, weights in zip(rows, reversed(rows), jnp.split(rest.weights, len(rows)), strict=True):
        where, n = own.members.where, weights.shape[0]
        temperature = jnp.broadcast_to(numbers.temperature, (n,))
        anchors = Anchors(own.rows, own.members, where, temperature, weights, None, None, None, None)
        candidates = Candidates(others.rows, others.members, None, None, None, None, None, rest.extras)
        with jax.default_matmul_precision(options.precision):
            if options.devices.ring:
                more, count = ring_sum(anchors, candidates, options)
            else:
                block = rows_per_block(n, n, options.block_size)
                more, count = sum_over_rows(partial(anchor_sum, options=options), anchors, candidates, block)
        total, counts = total + more, [*counts, count]
    return total, jnp.concatenate(counts)
