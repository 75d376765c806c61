"""Both directions of one matrix of scores from one visit of each of its blocks.

A block of anchors sees whole rows, so their sums are complete after one visit; the sums of the columns grow from block
to block and are complete after the last. The derivative of a log-sum needs only the complete log-sums, so one more
visit finds the derivatives of rows and columns together: 8 n m d operations in all, where two one-way passes need 12.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ntxent_jax.engine import floats, inner_product, join, length, moved, split
from ntxent_jax.formulas import Sums, sums
from ntxent_jax.numerics import LogSum, compute_dtype, grown_log_sum
from ntxent_jax.pairs import PairMasks

Tree = Any


class TwoWayTile(NamedTuple):
    """Some anchors against all candidates, and the temperatures of both.

    Attributes:
        scores: Shape ``[b, m]``.
        masks: Shape ``[b, m]``, False for anchors that are not real.
        temperature: Of the anchors, shape ``[b]``.
        candidate_temperature: Of the candidates, when they choose, shape ``[m]``.
    """

    scores: jax.Array
    masks: PairMasks
    temperature: jax.Array
    candidate_temperature: jax.Array

    def rows(self) -> Sums:
        """What the anchors see."""
        return sums(self.scores, self.masks, self.temperature)

    def columns(self) -> Sums:
        """What the candidates see of these anchors."""
        return sums(self.scores.T, PairMasks(*(mask.T for mask in self.masks)), self.candidate_temperature)


TileFunction = Callable[..., TwoWayTile]
Finish = Callable[[Sums, Sums, Tree], jax.Array]


def both_ways(f: TileFunction, finish: Finish, anchors: Tree, candidates: Tree, rest: Tree, block: int) -> jax.Array:
    """The scalar ``finish(rows, columns, rest)``.

    Its arguments are the sums of each anchor over the candidates, those of each candidate over the anchors, and what
    else it needs.
    """
    n = length(anchors)
    if block >= n:
        tile = f(anchors, jnp.ones(n, jnp.bool_), candidates)
        return finish(tile.rows(), tile.columns(), rest)
    blocks = split(anchors, block)
    f, closed_over = jax.closure_convert(f, *jax.tree.map(lambda x: x[0], blocks), candidates)
    return _streamed(f, lambda rows, columns, rest: finish(join(rows, n), columns, rest))(
        blocks, (candidates, *closed_over), rest
    )


def _streamed(f: TileFunction, finish: Finish) -> Callable[[Tree, Tree, Tree], jax.Array]:
    """As the engine's sum over rows, with a second visit of every block for the derivative."""

    @jax.custom_jvp
    def run(blocks: Tree, shared: Tree, rest: Tree) -> jax.Array:
        return finish(*_sums(f, blocks, shared), rest)

    @run.defjvp
    def run_with_derivative(primals: Tree, tangents: Tree) -> tuple[jax.Array, jax.Array]:
        blocks, shared, rest = primals
        rows, columns = _sums(f, blocks, shared)
        rest_floats, with_rest = floats(rest)
        value, pull_back = jax.vjp(lambda r, c, x: finish(r, c, with_rest(x)), rows, columns, rest_floats)
        by_rows, by_columns, of_rest = pull_back(jnp.ones_like(value))
        shared_floats, with_shared = floats(shared)

        def visit(gradient: list[jax.Array], own: tuple[Tree, Sums, Sums]) -> tuple[list[jax.Array], list[jax.Array]]:
            own, own_rows, by_own_rows = own
            own_floats, with_own = floats(own)

            def moved_part(x: list[jax.Array], y: list[jax.Array]) -> jax.Array:
                of_rows, of_columns = _shares(f(*with_own(x), *with_shared(y)), own_rows, columns)
                return inner_product(by_own_rows, of_rows) + inner_product(by_columns, of_columns)

            of_own, of_shared = jax.grad(moved_part, argnums=(0, 1))(own_floats, shared_floats)
            return [total + g for total, g in zip(gradient, of_shared, strict=True)], of_own

        start = [jnp.zeros_like(x, dtype=compute_dtype(x)) for x in shared_floats]
        of_shared, of_blocks = lax.scan(visit, start, (blocks, rows, by_rows))
        return value, inner_product([*of_blocks, *of_shared, *of_rest], moved(primals, tangents))

    return run


def _sums(f: TileFunction, blocks: Tree, shared: Tree) -> tuple[Sums, Sums]:
    def visit(columns: Sums, own: Tree) -> tuple[Sums, Sums]:
        tile = f(*own, *shared)
        return _grown(columns, tile.columns(), tile.candidate_temperature), tile.rows()

    first = jax.tree.map(lambda x: x[0], blocks)
    shapes = jax.eval_shape(lambda: f(*first, *shared).columns())
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    nothing = nothing._replace(negatives=LogSum(nothing.number, nothing.number - jnp.inf))
    columns, rows = lax.scan(visit, nothing, blocks)
    return rows, columns


def _grown(sums: Sums, more: Sums, temperature: jax.Array) -> Sums:
    """Sums over two disjoint sets of anchors."""
    return Sums(
        sums.positive + more.positive,
        grown_log_sum(sums.negatives, more.negatives, temperature),
        sums.number + more.number,
        sums.total + more.total,
    )


def _shares(tile: TwoWayTile, rows: Sums, columns: Sums) -> tuple[Sums, Sums]:
    """Sums of one block that move as the sums of all blocks do: a log-sum moves as its summands' shares of it."""

    def along(axis: int, of: Sums, temperature: jax.Array) -> Sums:
        def spread(x: jax.Array) -> jax.Array:
            return jnp.expand_dims(x, axis)

        (maximum, log_sum), negative = of.negatives, tile.masks.negative & (tile.scores != -jnp.inf)
        some = jnp.where(log_sum != -jnp.inf, log_sum, 0)
        shifted = jnp.where(negative, tile.scores - spread(maximum), 0) / spread(temperature) - spread(some)
        return Sums(
            jnp.sum(jnp.where(tile.masks.positive, tile.scores, 0), axis),
            LogSum(jnp.zeros_like(maximum), jnp.sum(jnp.where(negative, jnp.exp(shifted), 0), axis)),
            jnp.zeros_like(of.number),
            jnp.sum(jnp.where(tile.masks.negative, tile.scores, 0), axis),
        )

    return along(1, rows, tile.temperature), along(0, columns, tile.candidate_temperature)
