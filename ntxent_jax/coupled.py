"""Losses in which rows choose among each other, run on tiles that serve both of their sides."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ntxent_jax.batch import Batch, ready
from ntxent_jax.devices import Devices
from ntxent_jax.engine import SCORES, length, rows_per_block, spare_columns
from ntxent_jax.formulas import Extras, Negatives, Only, Positives, Sums, Terms, pair_terms, terms_of
from ntxent_jax.numerics import exps, level_of, log_of_sum, masked_exp
from ntxent_jax.pairs import Members, Place, at_most_two_alike, only_negatives
from ntxent_jax.scores import Options, weighted
from ntxent_jax.similarities import Rows, compare, has_range, score_range
from ntxent_jax.two_sided import (
    LARGEST,
    SUM,
    Inputs,
    Meet,
    Part,
    Steps,
    Total,
    added_up,
    among_themselves,
    at_once,
    between,
    layout_of,
    passed_around,
    sum_both_ways,
    with_positives,
)

# Rows of a tile at most, and how many such blocks are its columns. Smaller tiles make small, slow matrix products,
# larger ones leave the caches. Tiles that hold positives cost more, so labels ask for few columns around the diagonal.
# With 8,192 rows of 128 features 745 x 1,490 took 105 ms, others of 357 to 1,171 rows 104 to 139; with ten labels
# 482 x 482 took 160 ms, others 183 to 340.
_SHAPE, _SHAPE_BY_LABEL = (690, 2), (480, 1)
_ENTRIES = 1 << 19  # Of a tile whose rows are the user's choice.
# A batch is a single tile if its scores are no more than these. Several positives of a row make more arrays of that
# size: more than 32 MB in all, which Linux gives back after every step, made 1,280 rows four times as slow as 1,024.
_WHOLE, _WHOLE_BY_LABEL = 2 * SCORES, SCORES


MayHold = Callable[[Part], jax.Array] | bool
Levels = tuple[jax.Array, ...]
Entries = list[jax.Array | None]  # Of a tile, ``[b, w]``. The last ones may be None: nothing.


class Met(NamedTuple):
    """Rows that meet each other, and who they are."""

    rows: Rows
    members: Members


class Numbers(NamedTuple):
    """What all tiles share."""

    temperature: jax.Array
    middle: jax.Array


class Seen(NamedTuple):
    """What is seen of a tile.

    Attributes:
        scores: Shape ``[b, w]``.
        positive: Boolean, shape ``[b, w]``. None: there is nothing to be looked for.
        negative: Boolean, shape ``[b, w]``.
        columns: As in :class:`Part`.
    """

    scores: jax.Array
    positive: jax.Array | None
    negative: jax.Array
    columns: jax.Array


class Rest(NamedTuple):
    """What turns sums into a loss."""

    temperature: jax.Array
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
    met, numbers, rest, moderate = _prepared(batch, options)
    labels = met[0].members.label
    # Sorted by label, only tiles near the diagonal can hold positives.
    layout = layout_of(n, block, jnp.argsort(labels) if options.only is None and not whole else None)
    weights, where, only = jax.tree.map(lambda x: jnp.tile(layout.cut(x), sets), rest[1:4])
    cases = [_steps(each, common, whole, batch.extras) for each, common in _cases(options, whole)]
    total, number = sum_both_ways(
        cases,
        _meet(block, -(-n // block), sets, most, options.devices, whole),
        _case(len(cases), moderate, labels),
        Inputs(met, layout, numbers, rest._replace(weights=weights, where=where, only=only)),
    )
    return total, weights * number


def _prepared(batch: Batch, options: Options) -> tuple[tuple[Met, ...], Numbers, Rest, jax.Array]:
    """What the loss depends on, and whether one level serves all rows."""
    anchors, candidates = ready(batch, options.similarity, options.devices, options.only)
    temperature = jnp.where(batch.temperature > 0, batch.temperature, jnp.nan).astype(anchors.weights.dtype)
    level = level_of(*score_range(options.similarity, anchors.rows, candidates.rows, options.devices), temperature)
    both = [(anchors.rows, anchors.members), (candidates.rows, candidates.members)]
    both = both[:1] if batch.candidates is None else both
    sets = tuple(Met(x, members._replace(where=anchors.where)) for x, members in both)
    rest = Rest(temperature, anchors.weights / len(sets), anchors.where, anchors.only, candidates.extras)
    return sets, Numbers(temperature, level.middle), rest, level.moderate


def _cases(options: Options, whole: bool) -> list[tuple[Options, bool]]:
    """Options, and whether one level serves all rows, from the quickest case to that which fits any batch.

    Several positives of a row ask for more work on all pairs of a single tile, or, in form ``pair``, for a visit more.
    Without a common level the positive's score comes from the same product as all others: at a low temperature even
    their rounding must agree, so that equal rows are equally likely.
    """
    if options.only is not None:
        return [(options, True), (options._replace(only="somewhere"), False)]
    if options.devices.ring or not (whole or options.form == "pair"):  # In a ring one device does not see all labels.
        return [(options, True), (options, False)]
    return [(options._replace(only="somewhere"), True), (options, True), (options, False)]


def _case(cases: int, moderate: jax.Array, labels: jax.Array) -> jax.Array:
    """The number of the case that a batch is."""
    slow = jnp.where(moderate, cases - 2, cases - 1)
    return slow if cases == 2 else jnp.where(moderate & at_most_two_alike(labels), 0, slow)


def _steps(options: Options, common: bool, whole: bool, extras: Extras) -> Steps:
    several, may_hold = options.only is None, _may_hold_positives(options, whole)
    return Steps(
        partial(_common_levels if common else partial(_own_levels, may_hold), options),
        partial(_look, options),
        partial(_sums_of_tile, options=options, common=common, smoothed=extras.label_smoothing is not None),
        _terms_of_tile if several and options.form == "pair" else None,
        may_hold,
        partial(_finish, options=options),
    )


def _meet(block: int, blocks: int, sets: int, most: int, devices: Devices, whole: bool) -> Meet:
    """How blocks of each set of rows meet."""
    if whole:
        return at_once
    if devices.ring:
        return partial(passed_around, block=block, most=most, devices=devices)
    schedule = among_themselves(blocks, most) if sets == 1 else between(blocks, most)
    return partial(added_up, schedule=schedule, block=block)


def _cut(n: int, sets: int, options: Options) -> tuple[int, int]:
    """Rows of a tile and its blocks of columns at most, such that the last tiles are as full as the others."""
    together = options.only.times if isinstance(options.only, Place) else 1  # Views of an item stand in one block.
    if options.block_size is not None:
        block = rows_per_block(n, n, options.block_size)
        return block + -block % together, max(1, _ENTRIES // block**2)
    rows, width = _SHAPE_BY_LABEL if options.only is None else _SHAPE
    met = n / rows / (2 if sets == 1 else 1)  # Blocks that each block meets.
    parts = math.ceil(met / width)
    width = min(width, math.ceil(met / parts))
    blocks = parts * width if sets == 2 else 2 * parts * width - 1
    block = -(-n // blocks)
    return block + -block % together, width


def _may_hold_positives(options: Options, whole: bool) -> MayHold:
    """Whether a tile may hold positives that are not known yet."""
    if isinstance(options.only, Place):
        return False
    return True if whole else _labels_may_meet


def _labels_may_meet(part: Part) -> jax.Array:
    own, others = part.own.members.label, part.others.members.label
    return (jnp.min(own) <= jnp.max(others)) & (jnp.min(others) <= jnp.max(own))


def _sums_positives(options: Options) -> bool:
    """Whether a loss asks for the log-sum of each row's positives."""
    return options.only is None and options.form != "pair"


def _look(options: Options, part: Part, positives: bool) -> Seen:
    own, others = part.own, part.others
    with jax.default_matmul_precision(options.precision):
        scores = compare(options.similarity, own.rows, others.rows)
    rule = options.rule if positives or isinstance(options.only, Place) else only_negatives
    positive, negative = rule(own.members, others.members)
    asked = part.rows[None, :] & own.members.where[:, None]
    return Seen(scores, positive & asked if positives else None, negative & asked, part.columns)


def _common_levels(options: Options, meet: Meet, sets: tuple[Met, ...], numbers: Numbers) -> tuple[Levels, ...]:
    level = jnp.broadcast_to(numbers.middle, (length(sets[0]),))
    return ((level, level) if _sums_positives(options) else (level,),) * len(sets)


def _own_levels(
    may_hold: MayHold, options: Options, meet: Meet, sets: tuple[Met, ...], numbers: Numbers
) -> tuple[Levels, ...]:
    """The largest score of each row's negatives, and of its positives; 0 where there are none."""

    def largest(part: Part) -> tuple[Levels, Levels]:
        def of_sides(positives: bool) -> tuple[Levels, Levels]:
            tile = lax.stop_gradient(_look(options, part, positives))
            masks = [tile.negative, tile.positive] if _sums_positives(options) else [tile.negative]
            entries: Entries = [None if mask is None else jnp.where(mask, tile.scores, -jnp.inf) for mask in masks]
            return _both_sides(tile, entries, entries, LARGEST)

        return with_positives(may_hold, part, of_sides)

    levels, *_ = meet(largest, sets, total=LARGEST)
    found: tuple[Levels, ...] = jax.tree.map(lambda level: jnp.where(level != -jnp.inf, level, 0), levels)
    return found


def _sums_of_tile(
    tile: Seen,
    of_rows: Levels,
    of_columns: Levels,
    numbers: Numbers,
    *,
    options: Options,
    common: bool,
    smoothed: bool,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Sums over negatives, then over positives, of what the form asks for: see :func:`_finish`."""
    scores, positive, negative, _ = tile

    def exponentials(mask: jax.Array, level: jax.Array) -> jax.Array:
        if common:  # Finite everywhere.
            return masked_exp((scores - level) / numbers.temperature, mask)
        return exps(scores, mask & (scores != -jnp.inf), level, numbers.temperature)

    def entries(*levels: jax.Array) -> Entries:
        result: Entries = [exponentials(negative, levels[0])]
        if smoothed:
            result += [negative.astype(scores.dtype), jnp.where(negative, scores, 0)]
        if positive is None:
            result += [None] * (2 if options.only == "somewhere" else 3 if _sums_positives(options) else 0)
        elif options.only == "somewhere":
            result += [jnp.where(positive, scores, 0), positive.astype(scores.dtype)]
        elif _sums_positives(options):
            below = jnp.where(positive, levels[1] - scores, 0)
            result += [exponentials(positive, levels[1]), positive.astype(scores.dtype), below]
        return result

    if common:
        of_both = entries(*(numbers.middle for _ in of_rows))
        return _both_sides(tile, of_both, of_both)
    return _both_sides(tile, entries(*(x[:, None] for x in of_rows)), entries(*(x[None, :] for x in of_columns)))


def _both_sides(tile: Seen, of_rows: Entries, of_columns: Entries, total: Total = SUM) -> tuple[Levels, Levels]:
    """Totals of a tile's entries for its rows and for its columns; those of None are of nothing."""

    def along(axis: int, entries: Entries) -> Levels:
        known = [total.reduce(x, axis) for x in entries if x is not None]
        nothing = jnp.full_like(known[0], total.start)
        return *known, *[nothing] * (len(entries) - len(known))

    return along(1, of_rows), tuple(jnp.where(tile.columns, x, total.start) for x in along(0, of_columns))


def _terms_of_tile(
    tile: Seen,
    of_rows: Levels,
    of_columns: Levels,
    numbers: Numbers,
    rows: tuple[jax.Array],
    columns: tuple[jax.Array],
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Terms of form ``pair`` and how many, given the sums over all negatives."""
    scores, positive, *_ = tile
    assert positive is not None

    def terms(level: Levels, total: tuple[jax.Array], axis: int) -> jax.Array:
        negatives = log_of_sum(level[0], total[0])
        return pair_terms(scores, positive, negatives, jnp.broadcast_to(numbers.temperature, total[0].shape), axis)

    number: Entries = [positive.astype(scores.dtype)]
    (number_of_rows,), (number_of_columns,) = _both_sides(tile, number, number)
    of_columns_too = jnp.where(tile.columns, terms(of_columns, columns, 0), 0)
    return (terms(of_rows, rows, 1), number_of_rows), (of_columns_too, number_of_columns)


def _finish(
    levels_of_sets: tuple[Levels, ...],
    sums_of_sets: tuple[tuple[jax.Array, ...], ...],
    terms_of_sets: tuple[tuple[jax.Array, jax.Array] | None, ...],
    rest: Rest,
    *,
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """The sum of all weighted terms, and the number that each row adds to the count."""
    known = zip(levels_of_sets, sums_of_sets, terms_of_sets, strict=True)
    levels, sums, terms = jax.tree.map(lambda *x: jnp.concatenate(x), *known)
    temperature, weights, where, only, extras = rest
    temperature = jnp.broadcast_to(temperature, where.shape)
    smoothed, positives = extras.label_smoothing is not None, None
    negatives = Negatives(log_of_sum(levels[0], sums[0]), *(sums[1:3] if smoothed else (sums[0], sums[0])))
    if options.only == "somewhere":
        only = Only(sums[-2], sums[-1] > 0)
    if _sums_positives(options):
        positives = Positives(log_of_sum(levels[1], sums[1]), sums[2], sums[3])
    pairs = None if terms is None else Terms(*terms)
    result = terms_of(Sums(negatives, positives, only), pairs, temperature, -1 / temperature, options.form, extras)
    result = weighted(result, weights, where, options.reduction)
    return jnp.sum(result.total), result.number
