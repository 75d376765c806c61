"""Losses in which rows choose among each other, run on tiles that serve both of their sides."""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ntxent_jax.batch import Anchors, Batch, Candidates, ready
from ntxent_jax.devices import Devices
from ntxent_jax.engine import SCORES, length, rows_per_block, spare_columns, sum_of_either, sum_over_rows
from ntxent_jax.formulas import Extras, Negatives, Only, Positives, Sums, Terms, pair_terms, terms_of
from ntxent_jax.numerics import level_of, log_of_sum, masked_exp
from ntxent_jax.pairs import Members, PairMasks, at_most_two_alike, only_negatives
from ntxent_jax.ring import ring_sum
from ntxent_jax.scores import Options, anchor_sum, weighted
from ntxent_jax.similarities import Rows, compare, has_range, score_range
from ntxent_jax.two_sided import (
    Inputs,
    Layout,
    Meet,
    Part,
    Steps,
    added_up,
    among_themselves,
    at_once,
    between,
    in_order,
    in_strides,
    passed_around,
    sum_both_ways,
)

# Rows of a tile, and how many such blocks are its columns. Smaller tiles make small, slow matrix products, larger
# ones leave the caches. Tiles that hold positives cost more, so labels ask for few columns around the diagonal. With
# 8,192 rows of 128 features 357 x 1,428 took 117 ms, others of 235 to 1,171 rows 119 to 154; with labels 482 x 482
# took 162 ms, others 194 to 254.
_SHAPE, _SHAPE_BY_LABEL = (360, 4), (480, 1)
_ENTRIES = 1 << 19  # Of a tile whose rows are the user's choice.
# A batch is a single tile if its scores are no more than these. Several positives of a row make more arrays of that
# size: more than 32 MB in all, which Linux gives back after every step, made 1,280 rows four times as slow as 1,024.
_WHOLE, _WHOLE_BY_LABEL = 2 * SCORES, SCORES


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

    Not where a jitted program may be split over devices, each of which would have to see most of every tile's columns,
    unless all pairs are looked at as a whole.
    """
    devices = options.devices
    split = devices.axis is not None or (jax.device_count() > 1 and not _is_whole(batch, options))
    if options.reduction == "none" or batch.anchors.shape[0] == 0 or (split and not devices.ring):
        return False
    alike = batch.plain and batch.pair_where is None and batch.extras.class_prior is None
    return alike and batch.temperature.ndim == 0 and has_range(options.similarity)


def _is_whole(batch: Batch, options: Options) -> bool:
    n, most = batch.anchors.shape[0], _WHOLE_BY_LABEL if options.only is None else _WHOLE
    fits = n * n <= most if options.block_size is None else options.block_size >= n
    return fits and not options.devices.ring


def coupled_sum(batch: Batch, options: Options) -> tuple[jax.Array, jax.Array]:
    """Sum of the weighted terms of a loss, and what each anchor adds to the count.

    Of anchors among themselves, or, given candidates, the mean of both directions; on one tile or on many.
    """
    n, sets, whole = batch.anchors.shape[0], 1 if batch.candidates is None else 2, _is_whole(batch, options)
    # Of a symmetric tile no product with columns is needed.
    block, most = (n + (spare_columns(n) if sets == 2 else 0), 1) if whole else _cut(n, sets, options)
    anchors, candidates = ready(batch, options.similarity, options.devices, options.only)
    both = (anchors.rows, anchors.members), (candidates.rows, candidates.members)
    rows = tuple(Met(x, members._replace(where=anchors.where)) for x, members in both[:sets])
    temperature = jnp.where(batch.temperature > 0, batch.temperature, jnp.nan).astype(anchors.weights.dtype)
    level = level_of(*score_range(options.similarity, anchors.rows, candidates.rows, options.devices), temperature)
    numbers = Numbers(temperature, level.middle)
    weights, where, only = jax.tree.map(
        lambda x: jnp.tile(x, sets), (anchors.weights / sets, anchors.where, anchors.only)
    )
    inputs = Inputs(rows, numbers, Rest(numbers, weights, where, only, candidates.extras))
    run = partial(_sum, block=block, meet=_meet(-(-n // block), sets, most, options.devices, whole))
    if whole and options.only is None:
        # Several positives of a row ask for more work on all pairs. With two rows of each label there are none.
        one, several = (partial(run, options=options._replace(only=only)) for only in ("somewhere", None))
        total, number = sum_of_either(at_most_two_alike(anchors.members.label), one, several, (level.moderate, inputs))
    else:
        total, number = run((level.moderate, inputs), options=options)
    return total, anchors.weights * number[:n]


def _sum(inputs: tuple[jax.Array, Inputs], *, block: int, meet: Meet, options: Options) -> tuple[jax.Array, jax.Array]:
    several, whole = options.only is None, length(inputs[1].rows[0]) <= block
    steps = Steps(
        partial(_sums_of_tile, options=options, smoothed=inputs[1].rest.extras.label_smoothing is not None),
        partial(_terms_of_tile, options=options) if several and options.form == "pair" else None,
        several if whole or not several else _may_hold_positives,
        partial(_finish, options=options),
    )
    layout = partial(_layout, block=block, by_label=several and not whole)
    return sum_both_ways(steps, partial(_row_by_row, options=options), layout, meet, *inputs)


def _meet(blocks: int, sets: int, most: int, devices: Devices, whole: bool) -> Meet:
    """How blocks of each set of rows meet."""
    if whole:
        return partial(at_once, sets=sets)
    if devices.ring:
        return partial(passed_around, sets=sets, most=most, devices=devices)
    return partial(added_up, schedule=among_themselves(blocks, most) if sets == 1 else between(blocks, most))


def _cut(n: int, sets: int, options: Options) -> tuple[int, int]:
    """Rows of a tile and its blocks of columns at most, such that the last tiles are as full as the others."""
    if options.block_size is not None:
        block = rows_per_block(n, n, options.block_size)
        return block, max(1, _ENTRIES // block**2)
    rows, width = _SHAPE_BY_LABEL if options.only is None else _SHAPE
    met = n / rows / (2 if sets == 1 else 1)  # Blocks that each block meets.
    parts = max(1, round(met / width))
    width = min(width, math.ceil(met / parts))
    blocks = parts * width if sets == 2 else 2 * parts * width - 1
    return -(-n // blocks), width


def _layout(rows: tuple[Met, ...], *, block: int, by_label: bool) -> Layout:
    """Rows in runs of equal labels, so that only tiles near the diagonal can hold positives; as they are otherwise."""
    if by_label:
        return in_order(jnp.argsort(rows[0].members.label), block)
    return in_strides(rows[0].members.label.shape[0], block, len(rows))


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
    if options.only == "somewhere":
        entries += [jnp.where(masks.positive, scores, 0), masks.positive.astype(scores.dtype)]
    elif options.only is None and options.form != "pair":
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
    only = Only(sums[-2], sums[-1] > 0) if options.only == "somewhere" else rest.only
    if only is not None:
        known = Negatives(negatives, *(sums[1:] if rest.extras.label_smoothing is not None else (sums[0], sums[0])))
    else:
        known = Negatives(negatives, sums[0], sums[0])
        positives = None if terms is not None else Positives(log_of_sum(middle, sums[1]), sums[2], sums[3])
    pairs = None if terms is None else Terms(*terms)
    result = terms_of(Sums(known, positives, only), pairs, temperature, -1 / temperature, form, rest.extras)
    result = weighted(result, rest.weights, rest.where, options.reduction)
    return jnp.sum(result.total), result.number


def _row_by_row(inputs: Inputs, *, options: Options) -> tuple[jax.Array, jax.Array]:
    """The same loss for scores of any size: every row against its candidates, one direction after the other."""
    rows, numbers, rest = inputs
    total, counts = jnp.zeros_like(numbers.temperature), list[jax.Array]()
    n = length(rows[0])
    for i, (own, others) in enumerate(zip(rows, reversed(rows), strict=True)):
        where, temperature = own.members.where, jnp.broadcast_to(numbers.temperature, (n,))
        weights, only = jax.tree.map(lambda x, i=i: x[i * n : (i + 1) * n], (rest.weights, rest.only))
        anchors = Anchors(own.rows, own.members, where, temperature, weights, None, None, None, None, only=only)
        candidates = Candidates(others.rows, others.members, None, None, None, None, None, rest.extras)
        with jax.default_matmul_precision(options.precision):
            if options.devices.ring:
                more, count = ring_sum(anchors, candidates, options)
            else:
                block = rows_per_block(n, n, options.block_size or max(1, SCORES // n))  # Little memory, rarely used.
                more, count = sum_over_rows(partial(anchor_sum, options=options), anchors, candidates, block)
        total, counts = total + more, [*counts, count]
    return total, jnp.concatenate(counts)
