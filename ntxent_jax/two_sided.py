"""Tiles that serve their rows and their columns at once.

Where rows choose among themselves the matrix of scores is symmetric, so every part of it is looked at once, for the
rows that it couples in either direction; likewise where images choose among texts and texts among images. A row's loss
needs sums over all that it meets, and those are complete only after every tile was visited. A second visit finds the
derivatives: the sums are sums over tiles, so their derivative is one too. That makes ``4 n n d`` operations for ``n``
rows among themselves, where blocks of whole rows need ``6 n n d``, and 8 instead of 12 for two sets of rows. A small
batch is a single tile, whose scores are still there at the second visit.

To be sums, exponentials need a common level instead of each row's maximum. Whether they have one is known beforehand
(:class:`ntxent_jax.numerics.Level`); if not, another function takes over.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ntxent_jax.devices import Devices
from ntxent_jax.engine import (
    Moving,
    Tree,
    chosen,
    either,
    inner_product,
    join,
    length,
    split,
    value_and_gradient,
    with_derivative,
)

Sides = tuple[Tree, ...]  # Of the rows of a tile, of its columns, and what else is added up.
Flags = np.ndarray[Any, np.dtype[np.bool_]]
Numbers = np.ndarray[Any, np.dtype[np.integer]]


class Schedule(NamedTuple):
    """The tiles, one entry for each visit.

    Attributes:
        own: The block whose rows are the tile's rows, shape ``[t]``.
        start: The first of the ``c`` blocks whose rows are the tile's columns, shape ``[t]``.
        rows: Whether the rows still need a block of columns, shape ``[t, c]``.
        columns: Whether a block of columns still needs the rows, shape ``[t, c]``.
    """

    own: Numbers
    start: Numbers
    rows: Flags
    columns: Flags


class Part(NamedTuple):
    """One tile.

    Attributes:
        own: Its rows, ``[b, ...]``.
        others: The rows that they meet, its columns, ``[w, ...]``.
        rows: Boolean, shape ``[w]``. Whether the rows still need a column.
        columns: Boolean, shape ``[w]``. Whether a column still needs the rows.
    """

    own: Tree
    others: Tree
    rows: jax.Array
    columns: jax.Array


class Meet(Protocol):
    """Lets every two rows meet that should."""

    def __call__(self, f: Callable[[Part], Sides], rows: Tree, *, moved: bool = False) -> tuple[Tree, ...]:
        """What ``f`` returns for the sides of each tile, added up for rows in blocks, and the sums of the rest.

        ``moved`` says that ``f`` returns derivatives by these rows.
        """
        ...


class Steps(NamedTuple):
    """What is computed on each tile, for its rows and for its columns, and of what results.

    Attributes:
        first: ``(part, numbers, positives) -> (sums of rows, sums of columns)``; ``positives`` says whether the tile
            may hold any.
        second: ``(part, numbers, sums of rows, sums of columns) -> (terms of rows, terms of columns)`` on tiles that
            may hold positives, if a loss is not a function of sums alone. The sums must be a single array then.
        may_hold: ``part -> boolean`` scalar: whether a tile may hold positives, or what is true for all of them.
        finish: ``(sums, terms, rest) -> (loss, rows)`` with the sums and terms of each set; the rows have no
            derivative.
    """

    first: Callable[..., Sides]
    second: Callable[..., Sides] | None
    may_hold: Callable[[Part], jax.Array] | bool
    finish: Callable[[Tree, Tree, Tree], tuple[jax.Array, Tree]]


class Layout(NamedTuple):
    """How sets of rows are cut into blocks ``[k, b, ...]``, and how they are put together again.

    Copies of rows fill the last blocks; flags ``[n]`` are False there.
    """

    block: Callable[[tuple[Tree, ...]], Tree]
    unblock: Callable[[Tree], tuple[Tree, ...]]


def in_strides(n: int, block: int, sets: int) -> Layout:
    """Blocks of ``n`` rows of each set, as the engine of row blocks cuts them, one set behind the other."""

    def cut(rows: tuple[Tree, ...]) -> Tree:
        return jax.tree.map(lambda *x: jnp.concatenate(x), *(_without_filler(*split(one, block)) for one in rows))

    def mend(blocks: Tree) -> tuple[Tree, ...]:
        width = -(-n // block)
        return tuple(join(jax.tree.map(lambda x, i=i: x[i * width : (i + 1) * width], blocks), n) for i in range(sets))

    return Layout(cut, mend)


def in_order(order: jax.Array, block: int) -> Layout:
    """Blocks of one set of rows in an order, each a run of it."""
    n = order.shape[0]
    number = -(-n // block)
    places = jnp.concatenate([order, order[: number * block - n]]).reshape(number, block)
    real = jnp.less(jnp.arange(number * block), n).reshape(number, block)
    back = jnp.zeros_like(order).at[order].set(jnp.arange(n, dtype=order.dtype))

    def cut(rows: tuple[Tree, ...]) -> Tree:
        return _without_filler(jax.tree.map(lambda x: x[places], rows[0]), real)

    def mend(blocks: Tree) -> tuple[Tree, ...]:
        return (jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[back], blocks),)

    return Layout(cut, mend)


def _without_filler(blocks: Tree, real: jax.Array) -> Tree:
    return jax.tree.map(lambda x: x & real if x.dtype == jnp.bool_ else x, blocks)


class Inputs(NamedTuple):
    """What the loss depends on.

    Attributes:
        rows: One or two sets of rows, each a pytree whose arrays start with the rows' axis.
        numbers: What all tiles share.
        rest: What ``finish`` needs beside the sums.
    """

    rows: tuple[Tree, ...]
    numbers: Tree
    rest: Tree


def among_themselves(blocks: int, most: int) -> Schedule:
    """Each block meets itself and the half of all others that follows it in a circle, at most ``most`` at a time."""
    half, both = blocks // 2, (blocks - 1) // 2
    own, part, size = _parts(blocks, half + 1, most)
    distance = part[:, None] * size + np.arange(size)
    return Schedule(own, (own + part * size) % blocks, distance <= half, (distance > 0) & (distance <= both))


def between(blocks: int, most: int) -> Schedule:
    """Each of the first ``blocks`` meets each of as many that stand behind them, at most ``most`` at a time."""
    own, part, size = _parts(blocks, blocks, most)
    met = part[:, None] * size + np.arange(size) < blocks
    return Schedule(own, blocks + part * size, met, met)


def _parts(blocks: int, met: int, most: int) -> tuple[Numbers, Numbers, int]:
    """Each block paired with each of the parts, of nearly equal size, of what it meets; and that size."""
    parts = -(-met // most)
    own, part = np.divmod(np.arange(blocks * parts), parts)
    return own, part, -(-met // parts)


def sum_both_ways(
    steps: Steps,
    otherwise: Callable[[Inputs], tuple[jax.Array, Tree]],
    layout: Callable[[Tree], Layout],
    meet: Meet,
    moderate: jax.Array,
    inputs: Inputs,
) -> tuple[jax.Array, Tree]:
    """Loss of rows that meet as a schedule says, and rows that come with it.

    Args:
        steps: What is computed.
        otherwise: The same without steps, for scores that are not moderate.
        layout: From the rows to the way they are cut.
        meet: How all blocks meet.
        moderate: Boolean, scalar.
        inputs: What all of these see.
    """

    def visited(inputs: Inputs) -> tuple[jax.Array, Tree]:
        block, unblock = layout(inputs.rows)
        sums, terms, _ = _sums_and_terms(steps, meet, block(inputs.rows), inputs.numbers)
        return steps.finish(unblock(sums), unblock(terms), inputs.rest)

    def run(moderate: jax.Array, inputs: Inputs) -> tuple[jax.Array, Tree]:
        return either(moderate, visited, otherwise, inputs)

    def with_gradient(moving: Moving, moderate: jax.Array, inputs: Inputs) -> tuple[jax.Array, Tree, list[jax.Array]]:
        def visited_twice(inputs: Inputs) -> tuple[jax.Array, Tree, list[jax.Array]]:
            return _value_and_gradient(steps, layout(inputs.rows), meet, moving[1], inputs)

        return either(moderate, visited_twice, value_and_gradient(otherwise, moving[1]), inputs)

    return with_derivative(run, with_gradient)(moderate, inputs)


def _each(parts: tuple[Tree, ...], moving: list[bool]) -> list[list[bool]]:
    """Flags of the leaves of each part."""
    flags = iter(moving)
    return [[next(flags) for _ in jax.tree.leaves(part)] for part in parts]


def _sums_and_terms(steps: Steps, meet: Meet, rows: Tree, numbers: Tree) -> tuple[Tree, Tree, Tree]:
    """Sums, terms, and the derivative of each row's terms by its sum, in blocks as the rows are."""

    def first(part: Part) -> Sides:
        return _with_positives(steps, part, lambda positives: steps.first(part, numbers, positives))

    sums, *_ = meet(first, rows)
    terms_of = steps.second
    if terms_of is None:
        return sums, None, None

    def second(part: Part) -> Sides:
        (own, own_sums), (others, other_sums) = part.own, part.others
        part, known = part._replace(own=own, others=others), (own_sums, other_sums)

        def terms_and_slopes(positives: bool) -> Sides:
            ones = jax.tree.map(jnp.ones_like, known)
            terms, slopes = jax.jvp(lambda *sums: terms_of(part, numbers, *sums), known, ones)
            sides = (terms[0], slopes[0]), (terms[1], slopes[1])
            return sides if positives else jax.tree.map(jnp.zeros_like, sides)

        return _with_positives(steps, part, terms_and_slopes)

    (terms, slopes), *_ = meet(second, (rows, sums))
    return sums, terms, slopes


def _value_and_gradient(
    steps: Steps, layout: Layout, meet: Meet, moving: list[bool], inputs: Inputs
) -> tuple[jax.Array, Tree, list[jax.Array]]:
    rows, unblock = layout.block(inputs.rows), layout.unblock
    sums, terms, slopes = _sums_and_terms(steps, meet, rows, inputs.numbers)
    of_inputs, of_numbers, of_rest = _each(inputs, moving)
    of_sets = _each(inputs.rows, of_inputs)
    of_rows = [any(flags) for flags in zip(*of_sets, strict=True)]
    rest, with_rest = chosen(inputs.rest, of_rest)

    def finish(sums: Tree, terms: Tree, x: list[jax.Array]) -> tuple[jax.Array, Tree]:
        return steps.finish(unblock(sums), unblock(terms), with_rest(x))

    value, pull_back, others = jax.vjp(finish, sums, terms, rest, has_aux=True)
    by_sums, by_terms, by_rest = pull_back(jnp.ones_like(value))
    if steps.second is not None:  # The terms depend on the sums, each row's on its own.
        more = sum(jax.tree.leaves(jax.tree.map(jnp.multiply, by_terms, slopes)))
        by_sums = jax.tree.map(lambda x: x + more, by_sums)
    numbers, with_numbers = chosen(inputs.numbers, of_numbers)

    def gradient(part: Part) -> Sides:
        (own, *of_own), (others, *of_others) = part.own, part.others
        (x, with_x), (y, with_y) = chosen(own, of_rows), chosen(others, of_rows)

        def moved(x: list[jax.Array], y: list[jax.Array], z: list[jax.Array], positives: bool) -> jax.Array:
            moving_part = part._replace(own=with_x(x), others=with_y(y))
            return _moved(steps, moving_part, with_numbers(z), of_own, of_others, positives)

        part = part._replace(own=own, others=others)
        return _with_positives(steps, part, lambda positives: jax.grad(moved, (0, 1, 2))(x, y, numbers, positives))

    by_blocks, by_numbers = meet(gradient, (rows, sums, by_sums, by_terms), moved=True)
    by_sets = [
        x
        for flags, gradient in zip(of_sets, unblock(by_blocks), strict=True)
        for x, wanted in zip(gradient, itertools.compress(flags, of_rows), strict=True)
        if wanted
    ]
    return value, others, [*by_sets, *by_numbers, *by_rest]


def _moved(steps: Steps, part: Part, numbers: Tree, of_own: Tree, of_others: Tree, positives: bool) -> jax.Array:
    """A number that moves with a tile as the loss does."""
    (own_sums, by_own_sums, by_own_terms), (other_sums, by_other_sums, by_other_terms) = of_own, of_others
    number = inner_product((by_own_sums, by_other_sums), steps.first(part, numbers, positives))
    if positives and steps.second is not None:
        terms = steps.second(part, numbers, own_sums, other_sums)
        number = number + inner_product((by_own_terms, by_other_terms), terms)
    return number


def _with_positives(steps: Steps, part: Part, result: Callable[[bool], Sides]) -> Sides:
    """Pay for positives only where there may be any."""
    if isinstance(steps.may_hold, bool):
        return result(steps.may_hold)
    return either(steps.may_hold(part), lambda _: result(True), lambda _: result(False), None)


def at_once(f: Callable[[Part], Sides], rows: Tree, *, moved: bool = False, sets: int) -> tuple[Tree, ...]:
    """As :class:`Meet` with a single tile, each set being one block.

    Rows among themselves stand on both sides of it. The half of a derivative that they have as columns is the other
    half's mirror image, so it is found with the derivative of the rows, from one product.
    """
    own, others = (jax.tree.map(lambda x, i=i: x[i], rows) for i in (0, -1))
    everyone = jnp.ones(length(own), jnp.bool_)
    of_own, of_others, *more = f(Part(own, others, everyone, everyone if moved or sets == 2 else ~everyone))
    if sets == 2:
        return jax.tree.map(lambda *x: jnp.stack(x), of_own, of_others), *more
    more = jax.tree.map(lambda x: x / 2, more) if moved else more  # Every pair was met twice.
    return jax.tree.map(lambda x: x[None], of_own), *more


def added_up(f: Callable[[Part], Sides], rows: Tree, *, moved: bool = False, schedule: Schedule) -> tuple[Tree, ...]:
    """As :class:`Meet` with any schedule of tiles, where all blocks are at hand."""
    blocks, width = length(rows), schedule.rows.shape[1]
    overlap = max(0, int(schedule.start.max()) + width - blocks)
    circle = jax.tree.map(lambda x: jnp.concatenate([x, x[:overlap]]), rows)

    def columns(x: jax.Array, step: Schedule) -> jax.Array:
        return lax.dynamic_slice_in_dim(x, step.start, width)

    def of_tile(step: Schedule) -> Sides:
        own = jax.tree.map(lambda x: x[step.own], circle)
        others = jax.tree.map(lambda x: columns(x, step).reshape(-1, *x.shape[2:]), circle)
        return f(Part(own, others, *(jnp.repeat(flags, length(own)) for flags in (step.rows, step.columns))))

    def visit(totals: tuple[Tree, Tree], step: Schedule) -> tuple[tuple[Tree, Tree], None]:
        def add(total: jax.Array, own: jax.Array, others: jax.Array) -> jax.Array:
            total = total.at[step.own].add(own)
            others = columns(total, step) + others.reshape(width, *own.shape)
            return lax.dynamic_update_slice_in_dim(total, others, step.start, 0)

        of_own, of_others, *more = of_tile(step)
        return (jax.tree.map(add, totals[0], of_own, of_others), jax.tree.map(jnp.add, totals[1], more)), None

    steps = jax.tree.map(jnp.asarray, schedule)
    of_own, _, *more = jax.eval_shape(of_tile, jax.tree.map(lambda x: x[0], steps))

    def zeros(shape: tuple[int, ...], like: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.zeros_like(jax.tree.leaves(rows)[0], dtype=like.dtype, shape=shape)

    start = (
        jax.tree.map(lambda x: zeros((blocks + overlap, *x.shape), x), of_own),
        jax.tree.map(lambda x: zeros(x.shape, x), more),
    )
    (totals, sums), _ = lax.scan(visit, start, steps)
    return jax.tree.map(lambda x: x[:blocks].at[:overlap].add(x[blocks:]), totals), *sums


def passed_around(
    f: Callable[[Part], Sides], rows: Tree, *, moved: bool = False, sets: int, most: int, devices: Devices
) -> tuple[Tree, ...]:
    """As :class:`Meet` with the blocks of all devices, of which each holds its own and those that pass by.

    Blocks go round a circle of devices together with what is added up for them, and then home. Of one set every two
    devices meet once, so half of the circle is enough. Of two sets the first stays and the second goes all the way.
    """
    number, blocks = devices.number, length(rows) // sets
    steps = number // 2 if sets == 1 else number - 1
    opposite = steps if sets == 1 and number % 2 == 0 else number  # Devices so far apart meet twice, once from each.
    here = among_themselves(blocks, most) if sets == 1 else between(blocks, most)

    def ours(tree: Tree) -> Tree:
        return jax.tree.map(lambda x: x[:blocks], tree)

    def theirs(tree: Tree) -> Tree:
        return jax.tree.map(lambda x: x[-blocks:], tree)

    def visit(carry: Tree, step: jax.Array) -> tuple[Tree, None]:
        visitors, of_visitors, of_us, sums = carry

        def once(part: Part) -> Sides:
            return f(part._replace(columns=part.columns & (step != opposite)))

        both = jax.tree.map(lambda *x: jnp.concatenate(x), ours(rows), visitors)
        of_both, *more = added_up(once, both, schedule=between(blocks, most))
        of_visitors, of_us, sums = jax.tree.map(
            jnp.add, (of_visitors, of_us, sums), (theirs(of_both), ours(of_both), more)
        )
        visitors, of_visitors = devices.passed_on((visitors, of_visitors))  # Rows may travel while they are met.
        return (visitors, of_visitors, of_us, sums), None

    of_all, *sums = added_up(f, rows, schedule=here)
    of_visitors = theirs(of_all) if sets == 2 else jax.tree.map(jnp.zeros_like, of_all)
    start = *devices.passed_on((theirs(rows), of_visitors)), ours(of_all), sums
    (_, of_visitors, of_us, sums), _ = lax.scan(visit, start, jnp.arange(1, steps + 1))
    home = devices.passed_on(of_visitors, -steps - 1)
    return jax.tree.map(jnp.add if sets == 1 else lambda *x: jnp.concatenate(x), of_us, home), *sums
