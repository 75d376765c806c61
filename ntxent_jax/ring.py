"""Losses whose candidates pass by, one device's share at a time, and are never all in one place.

Devices stand in a circle. Each keeps its anchors and passes on the candidates that it has, until they are home again.
In the first round every anchor adds up what its loss needs to know, share by share; form ``pair`` with several
positives needs a second round, in which the sums of the first are known. In the last round the derivatives by the
candidates travel with them. A device holds two shares of candidates at any time, and one block of similarities.
"""

import operator
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ntxent_jax.batch import Anchors, Candidates
from ntxent_jax.devices import alike
from ntxent_jax.engine import Moving, Tree, chosen, inner_product, join, length, rows_per_block, split, with_derivative
from ntxent_jax.formulas import (
    Linear,
    Sums,
    Terms,
    Tile,
    added,
    from_linear,
    levels_of,
    linear,
    pairs_of,
    row_terms,
    sums_of,
    terms_of,
)
from ntxent_jax.numerics import LogSum, compute_dtype
from ntxent_jax.scores import Options, logit_temperature, right_similarity, tile, weighted
from ntxent_jax.similarities import is_builtin

Gradient = list[jax.Array]
# ``(home, anchors, rows, real, candidates)`` to rows for these anchors, and what is added up for these candidates.
# ``rows`` is what else is known of the anchors. ``real``, boolean ``[n]``, is False for copies that fill a block.
# ``home`` says that anchors see what they have for themselves alone, and none of the candidates.
Visit = Callable[[bool, Anchors, Tree, jax.Array, Candidates], tuple[Tree, Gradient]]


class Known(NamedTuple):
    """What the first rounds found out, for each anchor.

    Attributes:
        sums: Over all of its candidates; None for form ``sigmoid``.
        pairs: Its terms of form ``pair`` or ``sigmoid``, or None.
        slope: Derivative of the former's total by the log-sum of its negatives, or None.
    """

    sums: Sums | None
    pairs: Terms | None
    slope: jax.Array | None


def ring_terms(anchors: Anchors, candidates: Candidates, options: Options) -> Terms:
    """What each of this device's anchors adds to the loss.

    JAX differentiates this as it stands. Then it keeps all candidates that passed by, though no similarities.
    """
    anchors, options = _prepared(anchors, candidates, options)
    return _finish(_found(anchors, candidates, options), anchors, candidates, options)


def ring_sum(anchors: Anchors, candidates: Candidates, options: Options) -> tuple[jax.Array, jax.Array]:
    """Sum of the weighted terms of this device's anchors, and the number that each adds to the count."""
    anchors, options = _prepared(anchors, candidates, options)

    def run(anchors: Anchors, candidates: Candidates) -> tuple[jax.Array, jax.Array]:
        terms = _finish(_found(anchors, candidates, options), anchors, candidates, options)
        return jnp.sum(terms.total), terms.number

    if not is_builtin(options.similarity):  # It may close over arrays, which a derivative rule must not.
        return run(anchors, candidates)
    return with_derivative(run, partial(_with_gradient, options=options))(anchors, candidates)


def _prepared(anchors: Anchors, candidates: Candidates, options: Options) -> tuple[Anchors, Options]:
    if options.only is not None:  # The positive is at hand only for a while.
        anchors, options = anchors._replace(only=None), options._replace(only="somewhere")
    if candidates.margin is None:
        return anchors, options

    def find(home: bool, own: Anchors, _: Tree, real: jax.Array, others: Candidates) -> tuple[jax.Array, Gradient]:
        return right_similarity(*_at_hand(home, own, others), options), []

    right, _ = _around(find, operator.add, anchors, (), candidates, [], options)
    return anchors._replace(right=right), options


def _found(anchors: Anchors, candidates: Candidates, options: Options) -> Known:
    """All that the loss of each anchor depends on."""
    form, one_positive = options.form, options.only is not None

    def in_each(f: Callable[..., Tree], combine: Callable[[Tree, Tree], Tree], *rows: Tree) -> Tree:
        def visit(home: bool, own: Anchors, rows: Tree, real: jax.Array, others: Candidates) -> tuple[Tree, Gradient]:
            return f(tile(*_at_hand(home, own, others), options), *rows), []

        return _around(visit, combine, anchors, rows, candidates, [], options)[0]

    if form == "sigmoid":
        terms_of_tile = partial(row_terms, form=form, one_positive=True, extras=candidates.extras)
        return Known(None, in_each(terms_of_tile, _plus), None)
    combine = partial(added, temperature=logit_temperature(anchors, candidates))
    sums = in_each(partial(sums_of, form=form, one_positive=one_positive), combine)
    if form != "pair" or one_positive:
        return Known(sums, None, None)
    return Known(sums, *in_each(_pairs_and_slope, _plus, sums.negatives.log_sum))


def _pairs_and_slope(tile: Tile, negatives: LogSum) -> tuple[Terms, jax.Array]:
    def pairs(log_sum: jax.Array) -> Terms:
        return pairs_of(tile, negatives._replace(log_sum=log_sum))

    terms, slopes = jax.jvp(pairs, (negatives.log_sum,), (jnp.ones_like(negatives.log_sum),))
    return terms, slopes.total


def _finish(known: Known, anchors: Anchors, candidates: Candidates, options: Options) -> Terms:
    sums, terms, _ = known
    if sums is not None:
        temperature, lowest = logit_temperature(anchors, candidates), -1 / anchors.temperature
        terms = terms_of(sums, terms, temperature, lowest, options.form, candidates.extras)
    assert terms is not None
    return weighted(terms, anchors.weights, anchors.where, options.reduction)


def _with_gradient(
    moving: Moving, anchors: Anchors, candidates: Candidates, *, options: Options
) -> tuple[jax.Array, jax.Array, Gradient]:
    known, one_positive = _found(anchors, candidates, options), options.only is not None
    (own, with_own), (others, with_others) = chosen(anchors, moving[0]), chosen(candidates, moving[1])
    levels: tuple[jax.Array, ...] = ()
    numbers, negatives = None, None
    if known.sums is not None:
        levels, negatives = levels_of(known.sums), known.sums.negatives.log_sum
        numbers = linear(known.sums, levels, logit_temperature(anchors, candidates))

    def log_sum(numbers: Linear) -> jax.Array:
        return from_linear(numbers, levels, one_positive).negatives.log_sum.log_sum

    def finish(numbers: Linear | None, pairs: Terms | None, x: Gradient, y: Gradient) -> tuple[jax.Array, jax.Array]:
        sums = None if numbers is None else from_linear(numbers, levels, one_positive)
        terms = _finish(Known(sums, pairs, None), with_own(x), with_others(y), options)
        return jnp.sum(terms.total), terms.number

    value, pull_back, number = jax.vjp(finish, numbers, known.pairs, own, others, has_aux=True)
    by_numbers, by_pairs, by_own, by_others = pull_back(jnp.ones_like(value))
    by_terms = None if by_pairs is None else by_pairs.total
    # Terms of form `pair` depend on the negatives, each anchor's on its own.
    if known.slope is not None and by_terms is not None:
        by_numbers = _plus(by_numbers, jax.vjp(log_sum, numbers)[1](by_terms * known.slope)[0])
    visit = partial(_gradient_at_visit, moving=moving, options=options)
    rows = (by_numbers, by_terms), levels, negatives
    start = [jnp.zeros_like(x, dtype=compute_dtype(x)) for x in others]
    more_own, more_others = _around(visit, _plus, anchors, rows, candidates, start, options)
    return value, number, [*_plus(by_own, more_own), *_plus(by_others, more_others)]


def _gradient_at_visit(
    home: bool, own: Anchors, rows: Tree, real: jax.Array, others: Candidates, *, moving: Moving, options: Options
) -> tuple[Gradient, Gradient]:
    """Derivatives of what a visit adds, weighed with those of the loss by the sums that it adds to."""
    weights, levels, negatives = rows
    weights = jax.tree.map(lambda x: jnp.where(real, x, 0), weights)
    (own_floats, with_own), (other_floats, with_others) = chosen(own, moving[0]), chosen(others, moving[1])

    def moved(x: Gradient, y: Gradient) -> jax.Array:
        others = with_others(y)
        seen = tile(*_at_hand(home, with_own(x), others), options)
        if options.form == "sigmoid":
            return inner_product(weights, (None, row_terms(seen, "sigmoid", True, others.extras).total))
        numbers = linear(sums_of(seen, options.form, options.only is not None), levels, seen.temperature)
        terms = None if weights[1] is None else pairs_of(seen, negatives).total
        return inner_product(weights, (numbers, terms))

    gradient: tuple[Gradient, Gradient] = jax.grad(moved, (0, 1))(own_floats, other_floats)
    return gradient


def _around(
    visit: Visit,
    combine: Callable[[Tree, Tree], Tree],
    anchors: Anchors,
    rows: Tree,
    candidates: Candidates,
    start: Gradient,
    options: Options,
) -> tuple[Tree, Gradient]:
    """What visits to the candidates of all devices give: rows for the anchors, and what is added up for candidates."""
    devices, m = options.devices, length(candidates.rows)
    place = lax.axis_index(devices.axis)

    def seeing(first: jax.Array | int, number: int) -> Anchors:
        if anchors.pair_where is None:
            return anchors
        return anchors._replace(pair_where=lax.dynamic_slice_in_dim(anchors.pair_where, first, number, axis=1))

    def round_trip(carry: Tree, step: jax.Array) -> tuple[Tree, None]:
        visitors, of_visitors, result = carry
        share = (place - step) % devices.number
        # True, but not known to be: what depends on anchors alone JAX would do before the loop, for all similarities.
        present = jnp.broadcast_to(share >= 0, anchors.where.shape)
        own = seeing(share * m, m), rows, present
        more, of_visitors = _in_blocks(partial(visit, False), own, visitors, of_visitors, options)
        visitors, of_visitors = devices.passed_on((visitors, of_visitors))
        return (visitors, of_visitors, combine(result, more)), None

    own = seeing(0, 0), rows, jnp.ones_like(anchors.where)
    result, of_candidates = _in_blocks(partial(visit, True), own, candidates, start, options)
    carry, _ = alike(((candidates, of_candidates, result), place))
    (_, of_candidates, result), _ = lax.scan(round_trip, carry, jnp.arange(devices.number))
    return result, of_candidates


def _in_blocks(
    visit: Callable[..., tuple[Tree, Gradient]],
    own: tuple[Anchors, Tree, jax.Array],
    candidates: Candidates,
    start: Gradient,
    options: Options,
) -> tuple[Tree, Gradient]:
    """One visit, block by block of the anchors."""
    n, visit = length(own), jax.checkpoint(visit)
    block = rows_per_block(n, length(candidates.rows), options.block_size)
    if block >= n:
        result, more = visit(*own, candidates)
        return result, _plus(start, more)

    def visit_block(total: Gradient, part: tuple[tuple[Anchors, Tree, jax.Array], jax.Array]) -> tuple[Gradient, Tree]:
        (anchors, rows, present), real = part
        result, more = visit(anchors, rows, present & real, candidates)
        return _plus(total, more), result

    total, blocks = lax.scan(visit_block, start, split(own, block))
    return join(blocks, n), total


def _at_hand(home: bool, own: Anchors, others: Candidates) -> tuple[Anchors, Candidates]:
    if not home:
        return own._replace(plain=None, own=None), others
    rows, members, bias, guide, guided = jax.tree.map(lambda x: x[:0], others[:5])
    return own, others._replace(rows=rows, members=members, bias=bias, guide=guide, guided=guided)


def _plus(x: Tree, y: Tree) -> Tree:
    return jax.tree.map(jnp.add, x, y)
