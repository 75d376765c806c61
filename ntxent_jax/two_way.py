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

from ntxent_jax.engine import floats, join, length, moved, split
from ntxent_jax.formulas import Sums, sums
from ntxent_jax.numerics import LogSum, grown_log_sum
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


def sums_both_ways(f: TileFunction, anchors: Tree, candidates: Tree, block: int) -> tuple[Sums, Sums]:
    """Sums over the candidates of each anchor, and over the anchors of each candidate."""
    n = length(anchors)
    if block >= n:
        tile = f(anchors, jnp.ones(n, jnp.bool_), candidates)
        return tile.rows(), tile.columns()
    blocks = split(anchors, block)
    f, closed_over = jax.closure_convert(f, *jax.tree.map(lambda x: x[0], blocks), candidates)
    rows, columns = _streamed_sums(f)(blocks, (candidates, *closed_over))
    return join(rows, n), columns


def _streamed_sums(f: TileFunction) -> Callable[[Tree, Tree], tuple[Sums, Sums]]:
    """Sums of rows and columns with a derivative of one further visit.

    The tangent rule visits the blocks under ``jax.checkpoint``, so that its transpose, reverse mode, stores the
    log-sums and computes each block again.
    """

    @jax.custom_jvp
    def run(blocks: Tree, shared: Tree) -> tuple[Sums, Sums]:
        def visit(columns: Sums, own: Tree) -> tuple[Sums, Sums]:
            tile = f(*own, *shared)
            return _grown(columns, tile.columns(), tile.candidate_temperature), tile.rows()

        first = jax.tree.map(lambda x: x[0], blocks)
        shapes = jax.eval_shape(lambda: f(*first, *shared).columns())
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        nothing = nothing._replace(negatives=LogSum(nothing.number, nothing.number - jnp.inf))
        columns, rows = lax.scan(visit, nothing, blocks)
        return rows, columns

    @run.defjvp
    def run_with_tangent(primals: Tree, tangents: Tree) -> tuple[Tree, Tree]:
        blocks, shared = primals
        rows, columns = run(blocks, shared)
        shared_floats, with_shared = floats(shared)
        blocks_moved, shared_moved = moved(blocks, tangents[0]), moved(shared, tangents[1])

        @jax.checkpoint
        def change(own: Tree, own_moved: list[jax.Array], own_rows: Sums) -> tuple[Sums, Sums]:
            own_floats, with_own = floats(own)

            def shares(x: list[jax.Array], y: list[jax.Array]) -> tuple[Sums, Sums]:
                tile = f(*with_own(x), *with_shared(y))
                return _shares(tile, own_rows, columns)

            tangent: tuple[Sums, Sums]
            _, tangent = jax.jvp(shares, (own_floats, shared_floats), (own_moved, shared_moved))
            return tangent

        def visit(total: Sums, own: tuple[Tree, list[jax.Array], Sums]) -> tuple[Sums, Sums]:
            of_rows, of_columns = change(*own)
            return jax.tree.map(jnp.add, total, of_columns), of_rows

        start = jax.tree.map(jnp.zeros_like, columns)
        of_columns, of_rows = lax.scan(visit, start, (blocks, blocks_moved, rows))
        return (rows, columns), (of_rows, of_columns)

    return run


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

        negative, (maximum, log_sum) = tile.masks.negative, of.negatives
        some = jnp.where(log_sum != -jnp.inf, log_sum, 0)
        shifted = jnp.where(negative, tile.scores - spread(maximum), 0) / spread(temperature) - spread(some)
        return Sums(
            jnp.sum(jnp.where(tile.masks.positive, tile.scores, 0), axis),
            LogSum(jnp.zeros_like(maximum), jnp.sum(jnp.where(negative, jnp.exp(shifted), 0), axis)),
            jnp.zeros_like(of.number),
            jnp.sum(jnp.where(negative, tile.scores, 0), axis),
        )

    return along(1, rows, tile.temperature), along(0, columns, tile.candidate_temperature)
