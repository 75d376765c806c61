"""Tiles that serve their rows and their columns at once.

Where rows choose among themselves the matrix of scores is symmetric, so every part of it is looked at once, for the
rows that it couples in either direction; likewise where images choose among texts and texts among images. A row's loss
needs sums over all that it meets, and those are complete only after every tile was visited. A second visit finds the
derivatives: the sums are sums over tiles, so their derivative is one too. That makes ``4 n n d`` operations for ``n``
rows among themselves, where blocks of whole rows need ``6 n n d``, and 8 instead of 12 for two sets of rows. A small
batch is a single tile, whose scores are still there at the second visit.

To be sums, exponentials need a level that is known beforehand. Mostly one serves all rows
(:class:`ntxent_jax.numerics.Level`), and one exponential both sides of a tile; if none does, a visit more finds the
maximum of each row.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
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
    inner_product,
    length,
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


class Total(NamedTuple):
    """How what is found on several tiles becomes one.

    Attributes:
        combine: Of two.
        reduce: Of all entries of a tile along an axis.
        start: Of none.
    """

    combine: Callable[[jax.Array, jax.Array], jax.Array]
    reduce: Callable[[jax.Array, int], jax.Array]
    start: float


SUM, LARGEST = Total(jnp.add, jnp.sum, 0), Total(jnp.maximum, jnp.max, -jnp.inf)


class Meet(Protocol):
    """Lets the rows of one set meet each other, or those of two sets the rows of the other."""

    def __call__(
        self, f: Callable[[Part], Sides], sets: tuple[Tree, ...], *, total: Total = SUM
    ) -> tuple[tuple[Tree, ...], ...]:
        """The totals of what ``f`` returns for the sides of each tile, for the rows of each set, and sums of the rest.

        The rest, if there is any, is the loss's derivative by numbers that all tiles share.
        """
        ...


class Steps(NamedTuple):
    """What is computed on each tile, for its rows and for its columns, and of what results.

    Attributes:
        levels: ``(meet, sets, numbers) -> levels`` of the rows of each set, constants for differentiation.
        look: ``(part, positives) -> tile``, what all others see of it; ``positives`` says whether it may hold any.
        first: ``(tile, levels of rows, levels of columns, numbers) -> (sums of rows, sums of columns)``.
        second: ``(tile, levels of rows, levels of columns, numbers, sums of rows, sums of columns) -> (terms of rows,
            terms of columns)`` on tiles that may hold positives, if a loss is not a function of sums alone. The sums
            must be a single array then.
        may_hold: ``part -> boolean`` scalar: whether a tile may hold positives, or what is true for all of them.
        finish: ``(levels, sums, terms, rest) -> (loss, rows)`` with what is known of each set; the rows have no
            derivative.
    """

    levels: Callable[[Meet, tuple[Tree, ...], Tree], tuple[Tree, ...]]
    look: Callable[[Part, bool], Tree]
    first: Callable[..., Sides]
    second: Callable[..., Sides] | None
    may_hold: Callable[[Part], jax.Array] | bool
    finish: Callable[..., tuple[jax.Array, Tree]]


class Layout(NamedTuple):
    """Where the rows of a set stand while they meet, in whole blocks.

    Attributes:
        real: Boolean, shape ``[m]``. False for copies, which fill the last block.
        places: Which of the ``n`` rows stands there, shape ``[m]``. None: they stand as they came.
        back: Where each row stands, shape ``[n]``, or None.
    """

    real: jax.Array
    places: jax.Array | None
    back: jax.Array | None

    def cut(self, x: jax.Array) -> jax.Array:
        """Rows in blocks; flags of copies are False."""
        n, m = x.shape[0], self.real.shape[0]
        if self.places is not None:
            x = x[self.places]
        elif m > n:
            x = jnp.concatenate([x, x[2 * n - m :]])
        return x & self.real if x.dtype == jnp.bool_ else x

    def mend(self, x: jax.Array, n: int) -> jax.Array:
        """The rows as they came."""
        return x[:n] if self.back is None else x[self.back]


def layout_of(n: int, block: int, order: jax.Array | None) -> Layout:
    """``n`` rows in whole blocks, in an order or as they are. Copies of the last rows fill the last block."""
    plain = Layout(jnp.less(jnp.arange(n + -n % block), n), None, None)
    if order is None:
        return plain
    return plain._replace(places=plain.cut(order), back=jnp.zeros_like(order).at[order].set(jnp.arange(n)))


class Inputs(NamedTuple):
    """What the loss depends on.

    Attributes:
        sets: Rows that meet each other, or two sets that meet, each a pytree whose arrays start with the rows' axis.
        layout: Of each set.
        numbers: What all tiles share.
        rest: What ``finish`` needs beside the sums, that of rows as they are laid out.
    """

    sets: tuple[Tree, ...]
    layout: Layout
    numbers: Tree
    rest: Tree


def among_themselves(blocks: int, most: int) -> Schedule:
    """Each block meets itself and the half of all others that follows it in a circle, at most ``most`` at a time."""
    half, both = blocks // 2, (blocks - 1) // 2
    own, part, size = _parts(blocks, half + 1, most)
    distance = part[:, None] * size + np.arange(size)
    return Schedule(own, (own + part * size) % blocks, distance <= half, (distance > 0) & (distance <= both))


def between(blocks: int, most: int) -> Schedule:
    """Each block of one set meets each of as many of another, at most ``most`` at a time."""
    own, part, size = _parts(blocks, blocks, most)
    met = part[:, None] * size + np.arange(size) < blocks
    return Schedule(own, part * size, met, met)


def _parts(blocks: int, met: int, most: int) -> tuple[Numbers, Numbers, int]:
    """Each block paired with each of the parts, of nearly equal size, of what it meets; and that size."""
    parts = -(-met // most)
    own, part = np.divmod(np.arange(blocks * parts), parts)
    return own, part, -(-met // parts)


def sum_both_ways(cases: Sequence[Steps], meet: Meet, case: jax.Array, inputs: Inputs) -> tuple[jax.Array, Tree]:
    """Loss of rows that meet, and rows that come with it.

    Args:
        cases: What may be computed.
        meet: How all rows meet.
        case: Integer, scalar. Which of the cases it is.
        inputs: What all of these see.
    """

    def laid_out(inputs: Inputs) -> Inputs:
        return inputs._replace(sets=jax.tree.map(inputs.layout.cut, inputs.sets))

    def visited(steps: Steps) -> Callable[[Inputs], tuple[jax.Array, Tree]]:
        def result(inputs: Inputs) -> tuple[jax.Array, Tree]:
            levels, sums, terms, _ = _sums_and_terms(steps, meet, inputs.sets, inputs.numbers)
            return steps.finish(levels, sums, terms, inputs.rest)

        return result

    def run(case: jax.Array, inputs: Inputs) -> tuple[jax.Array, Tree]:
        result: tuple[jax.Array, Tree] = lax.switch(case, [visited(steps) for steps in cases], laid_out(inputs))
        return result

    def with_gradient(moving: Moving, case: jax.Array, inputs: Inputs) -> tuple[jax.Array, Tree, list[jax.Array]]:
        ways = [partial(_value_and_gradient, steps, meet, moving[1]) for steps in cases]
        value, rows, gradient = lax.switch(case, ways, laid_out(inputs))
        of_sets = sum(_each(inputs, moving[1])[0])
        by_sets = [inputs.layout.mend(x, length(inputs.sets[0])) for x in gradient[:of_sets]]
        return value, rows, [*by_sets, *gradient[of_sets:]]

    return with_derivative(run, with_gradient)(case, inputs)


def _each(parts: tuple[Tree, ...], moving: list[bool]) -> list[list[bool]]:
    """Flags of the leaves of each part."""
    flags = iter(moving)
    return [[next(flags) for _ in jax.tree.leaves(part)] for part in parts]


def _sums_and_terms(steps: Steps, meet: Meet, sets: tuple[Tree, ...], numbers: Tree) -> tuple[tuple[Tree, ...], ...]:
    """Of the rows of each set the levels, sums, terms, and the derivative of the terms by the sum."""
    levels = steps.levels(meet, sets, numbers)

    def first(part: Part) -> Sides:
        part, (levels,), (other_levels,) = _opened(part)
        known = levels, other_levels, numbers
        return with_positives(steps.may_hold, part, lambda positives: steps.first(steps.look(part, positives), *known))

    sums, *_ = meet(first, _beside(sets, levels))
    terms_of = steps.second
    if terms_of is None:
        return levels, sums, (None,) * len(sets), (None,) * len(sets)

    def second(part: Part) -> Sides:
        part, (levels, sums), (other_levels, other_sums) = _opened(part)
        known, totals = (levels, other_levels, numbers), (sums, other_sums)

        def terms_and_slopes(positives: bool) -> Sides:
            terms_of_tile = partial(terms_of, steps.look(part, True), *known)
            terms, slopes = jax.jvp(terms_of_tile, totals, jax.tree.map(jnp.ones_like, totals))
            sides = _beside(terms, slopes)
            return sides if positives else jax.tree.map(jnp.zeros_like, sides)

        return with_positives(steps.may_hold, part, terms_and_slopes)

    found, *_ = meet(second, _beside(sets, levels, sums))
    terms, slopes = zip(*found, strict=True)
    return levels, sums, terms, slopes


def _beside(*several: tuple[Tree, ...]) -> tuple[Tree, ...]:
    """What is known of the rows of each set, together."""
    return tuple(zip(*several, strict=True))


def _opened(part: Part) -> tuple[Part, tuple[Tree, ...], tuple[Tree, ...]]:
    """A tile of rows only, and what came with those of each side."""
    (own, *of_own), (others, *of_others) = part.own, part.others
    return part._replace(own=own, others=others), tuple(of_own), tuple(of_others)


def _value_and_gradient(
    steps: Steps, meet: Meet, moving: list[bool], inputs: Inputs
) -> tuple[jax.Array, Tree, list[jax.Array]]:
    of_rows, _, of_numbers, of_rest = _each(inputs, moving)
    of_sets = _each(inputs.sets, of_rows)
    levels, sums, terms, slopes = _sums_and_terms(steps, meet, inputs.sets, inputs.numbers)
    rest, with_rest = chosen(inputs.rest, of_rest)

    def finish(sums: Tree, terms: Tree, x: list[jax.Array]) -> tuple[jax.Array, Tree]:
        return steps.finish(levels, sums, terms, with_rest(x))

    value, pull_back, others = jax.vjp(finish, sums, terms, rest, has_aux=True)
    by_sums, by_terms, by_rest = pull_back(jnp.ones_like(value))
    if steps.second is not None:  # The terms depend on the sums, each row's on its own.
        by_sums = tuple(
            jax.tree.map(lambda x, more=more: x + more, x)
            for x, *pair in zip(by_sums, by_terms, slopes, strict=True)
            for more in [sum(jax.tree.leaves(jax.tree.map(jnp.multiply, *pair)))]
        )
    numbers, with_numbers = chosen(inputs.numbers, of_numbers)

    def gradient(part: Part) -> Sides:
        part, of_own, of_others = _opened(part)
        (x, with_x), (y, with_y) = chosen(part.own, of_sets[0]), chosen(part.others, of_sets[-1])

        def moved(x: list[jax.Array], y: list[jax.Array], z: list[jax.Array], positives: bool) -> jax.Array:
            moving_part = part._replace(own=with_x(x), others=with_y(y))
            return _moved(steps, moving_part, with_numbers(z), of_own, of_others, positives)

        return with_positives(
            steps.may_hold, part, lambda positives: jax.grad(moved, (0, 1, 2))(x, y, numbers, positives)
        )

    by_sets, by_numbers = meet(gradient, _beside(inputs.sets, levels, sums, by_sums, by_terms))
    return value, others, [*itertools.chain(*by_sets), *by_numbers, *by_rest]


def _moved(steps: Steps, part: Part, numbers: Tree, of_own: Tree, of_others: Tree, positives: bool) -> jax.Array:
    """A number that moves with a tile as the loss does."""
    (levels, sums, by_sums, by_terms), (other_levels, other_sums, by_other_sums, by_other_terms) = of_own, of_others
    known = steps.look(part, positives), levels, other_levels, numbers
    number = inner_product((by_sums, by_other_sums), steps.first(*known))
    if positives and steps.second is not None:
        number = number + inner_product((by_terms, by_other_terms), steps.second(*known, sums, other_sums))
    return number


def with_positives(may_hold: Callable[[Part], jax.Array] | bool, part: Part, result: Callable[[bool], Sides]) -> Sides:
    """Pay for positives only where there may be any."""
    if isinstance(may_hold, bool):
        return result(may_hold)
    sides: Sides = lax.cond(may_hold(part), lambda: result(True), lambda: result(False))
    return sides


def at_once(f: Callable[[Part], Sides], sets: tuple[Tree, ...], *, total: Total = SUM) -> tuple[tuple[Tree, ...], ...]:
    """As :class:`Meet` with a single tile.

    Rows among themselves stand on both sides of it. The half of a derivative that they have as columns is the other
    half's mirror image, so it is found with the derivative of the rows, from one product.
    """
    everyone = jnp.ones(length(sets[-1]), jnp.bool_)
    of_own, of_others, *rest = f(Part(sets[0], sets[-1], everyone, everyone))
    if len(sets) == 2:
        return (of_own, of_others), *rest
    return (of_own,), *jax.tree.map(lambda x: x / 2, rest)  # Every pair was met twice.


def added_up(
    f: Callable[[Part], Sides],
    sets: tuple[Tree, ...],
    *,
    total: Total = SUM,
    schedule: Schedule,
    block: int,
) -> tuple[tuple[Tree, ...], ...]:
    """As :class:`Meet` with any schedule of tiles, where all blocks are at hand."""
    n, width = length(sets[-1]), schedule.rows.shape[1] * block
    overlap = max(0, int(schedule.start.max()) * block + width - n)
    if overlap:
        sets = *sets[:-1], jax.tree.map(lambda x: jnp.concatenate([x, x[:overlap]]), sets[-1])

    def part_of(rows: Tree, start: Numbers, size: int) -> Tree:
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start * block, size), rows)

    @partial(jax.jit, inline=True)  # Traced once, for the shapes and for the loop.
    def of_tile(step: Schedule) -> Sides:
        sides = part_of(sets[0], step.own, block), part_of(sets[-1], step.start, width)
        return f(Part(*sides, *(jnp.repeat(flags, block) for flags in (step.rows, step.columns))))

    def put(rows: Tree, more: Tree, start: Numbers) -> Tree:
        def combined(x: jax.Array, y: jax.Array) -> jax.Array:
            together = total.combine(part_of(x, start, y.shape[0]), y)
            return lax.dynamic_update_slice_in_dim(x, together, start * block, axis=0)

        return jax.tree.map(combined, rows, more)

    def visit(found: tuple[tuple[Tree, ...], Tree], step: Schedule) -> tuple[tuple[tuple[Tree, ...], Tree], None]:
        of_sets, (of_own, of_others, *more) = list(found[0]), of_tile(step)
        of_sets[0] = put(of_sets[0], of_own, step.own)
        of_sets[-1] = put(of_sets[-1], of_others, step.start)
        return (tuple(of_sets), jax.tree.map(jnp.add, found[1], more)), None

    like = jax.tree.leaves(sets)[0]

    def nothing(side: Tree, rows: Tree) -> Tree:
        n = length(rows)
        return jax.tree.map(lambda x: jnp.full_like(like, total.start, x.dtype, shape=(n, *x.shape[1:])), side)

    steps = jax.tree.map(jnp.asarray, schedule)
    of_own, of_others, *more = jax.eval_shape(of_tile, jax.tree.map(lambda x: x[0], steps))
    start = tuple(map(nothing, (of_own, of_others)[-len(sets) :], sets))
    none = jax.tree.map(lambda x: jnp.zeros_like(like, x.dtype, x.shape), more)
    ((*first, last), sums), _ = lax.scan(visit, (start, none), steps)
    if overlap:
        last = jax.tree.map(lambda x: x[:n].at[:overlap].set(total.combine(x[:overlap], x[n:])), last)
    return (*first, last), *sums


def passed_around(
    f: Callable[[Part], Sides],
    sets: tuple[Tree, ...],
    *,
    total: Total = SUM,
    block: int,
    most: int,
    devices: Devices,
) -> tuple[tuple[Tree, ...], ...]:
    """As :class:`Meet` with the rows of all devices, of which each holds its own and those that pass by.

    Rows go round a circle of devices together with what is found for them, and then home. Of one set every two devices
    meet once, so half of the circle is enough. Of two sets the first stays and the second goes all the way.
    """
    number, blocks, alone = devices.number, length(sets[0]) // block, len(sets) == 1
    steps = number // 2 if alone else number - 1
    opposite = steps if alone and number % 2 == 0 else number  # Devices so far apart meet twice, once from each.
    meet = partial(added_up, total=total, block=block)

    def visit(carry: Tree, step: jax.Array) -> tuple[Tree, None]:
        visitors, of_visitors, of_us, sums = carry

        def once(part: Part) -> Sides:
            return f(part._replace(columns=part.columns & (step != opposite)))

        # For all that JAX knows these depend on the step. Else it would do before the loop what needs only rows that
        # stay, and keep it for all tiles.
        us, _ = lax.optimization_barrier((sets[0], step))
        found, *more = meet(once, (us, visitors), schedule=between(blocks, most))
        of_us, of_visitors = jax.tree.map(total.combine, (of_us, of_visitors), found)
        visitors, of_visitors = devices.passed_on((visitors, of_visitors))  # Rows may travel while they are met.
        return (visitors, of_visitors, of_us, jax.tree.map(jnp.add, sums, more)), None

    here = among_themselves(blocks, most) if alone else between(blocks, most)
    of_sets, *sums = meet(f, sets, schedule=here)
    of_visitors = jax.tree.map(lambda x: jnp.full_like(x, total.start), of_sets[0]) if alone else of_sets[-1]
    start = *devices.passed_on((sets[-1], of_visitors)), of_sets[0], sums
    (_, of_visitors, of_us, sums), _ = lax.scan(visit, start, jnp.arange(1, steps + 1))
    home = devices.passed_on(of_visitors, -steps - 1)
    return (jax.tree.map(total.combine, of_us, home),) if alone else (of_us, home), *sums
