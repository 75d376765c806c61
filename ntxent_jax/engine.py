"""How a function of whole rows is run: all anchors at once, or block by block with memory linear in their number.

A *row function* ``f(anchors, real, candidates)`` sees some anchors (a pytree whose arrays all start with the anchors'
axis), which of them are real (boolean, shape ``[b]``) and all candidates. The engine knows nothing else about losses.

Streamed, the anchors are visited in blocks under ``lax.scan``. A block sees whole rows of the ``[n, m]`` matrix, so its
part of the sum and the derivative of that part come out of one visit, and no array of that size ever exists.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from ntxent_jax.devices import is_alike
from ntxent_jax.numerics import compute_dtype

Tree = Any
Moving = list[list[bool]]
SumFunction = Callable[..., tuple[jax.Array, Tree]]
MapFunction = Callable[..., Tree]

# Scores held at once when the user gives no block size: a few megabytes, so that a block's passes stay in cache. But a
# product of few rows is slow: with 65,536 candidates blocks of 128 rows took 1.7 s where those of 22 took 2.9.
SCORES, _LEAST_ROWS = 3 << 19, 128


def rows_per_block(n: int, m: int, block_size: int | None) -> int:
    """Number of anchors visited at once: at most the user's, in blocks of nearly equal size."""
    if n == 0:
        return 0
    most = max(_LEAST_ROWS, SCORES // max(m, 1)) if block_size is None else block_size
    number_of_blocks = -(-n // most)
    return -(-n // number_of_blocks)


def spare_columns(m: int) -> int:
    """How many of no meaning to add to ``m`` columns of scores, so that products with them are quick on a CPU.

    Rows that are a large power of two apart fall on the same lines of its cache: that made losses of 1,024 and of 8,192
    keys a quarter slower.
    """
    return 16 if m > 0 and m % 512 == 0 and jax.default_backend() == "cpu" else 0


def sum_over_rows(f: SumFunction, anchors: Tree, candidates: Tree, block: int) -> tuple[jax.Array, Tree]:
    """Sum of the scalars that ``f`` returns first; the rows that it returns second, which have no derivative."""
    n = length(anchors)
    if block >= n:
        return f(anchors, jnp.ones(n, jnp.bool_), candidates)
    blocks = split(anchors, block)
    converted, closed_over = jax.closure_convert(f, *jax.tree.map(lambda x: x[0], blocks), candidates)
    if is_alike((blocks, candidates, closed_over)):
        total, rows = _streamed_sum(converted)(blocks, (candidates, *closed_over))
    else:  # What a similarity closes over is the same on all devices: JAX itself must add up its gradient over them.
        totals, rows = lax.map(jax.checkpoint(lambda own: f(*own, candidates)), blocks)
        total = jnp.sum(totals)
    return total, join(rows, n)


def map_rows(f: MapFunction, anchors: Tree, candidates: Tree, block: int) -> Tree:
    """Rows that ``f`` returns, with derivative: in reverse mode a block is computed again instead of stored."""
    n = length(anchors)
    if block >= n:
        return f(anchors, jnp.ones(n, jnp.bool_), candidates)
    rows = lax.map(jax.checkpoint(lambda own: f(*own, candidates)), split(anchors, block))
    return join(rows, n)


def _streamed_sum(f: SumFunction) -> SumFunction:
    """``f`` summed over blocks, with a derivative that is found in the same visits as the value."""

    def run(blocks: Tree, shared: Tree) -> tuple[jax.Array, Tree]:
        values, rows = lax.map(lambda own: f(*own, *shared), blocks)
        return jnp.sum(values), rows

    def with_gradient(moving: Moving, blocks: Tree, shared: Tree) -> tuple[jax.Array, Tree, list[jax.Array]]:
        of_blocks, of_shared = moving
        shared_floats, with_shared = chosen(shared, of_shared)

        def visit(gradient: list[jax.Array], own: Tree) -> tuple[list[jax.Array], Tree]:
            own_floats, with_own = chosen(own, of_blocks)
            value, pull_back, rows = jax.vjp(
                lambda x, y: f(*with_own(x), *with_shared(y)), own_floats, shared_floats, has_aux=True
            )
            by_own, by_shared = pull_back(jnp.ones_like(value))
            return [total + g for total, g in zip(gradient, by_shared, strict=True)], (value, rows, by_own)

        start = [jnp.zeros_like(x, dtype=compute_dtype(x)) for x in shared_floats]
        by_shared, (values, rows, by_blocks) = lax.scan(visit, start, blocks)
        return jnp.sum(values), rows, [*by_blocks, *by_shared]

    return with_derivative(run, with_gradient)


def with_derivative(
    run: SumFunction, with_gradient: Callable[..., tuple[jax.Array, Tree, list[jax.Array]]]
) -> SumFunction:
    """A scalar function of pytrees, whose gradient is computed together with its value.

    Its tangent is the inner product of that gradient with the tangents of the inputs, which JAX can transpose, vmap
    and differentiate again in either mode; a custom_vjp would forbid forward mode.

    Args:
        run: ``(*inputs) -> (value, rows)``, where the rows have no derivative.
        with_gradient: ``(moving, *inputs) -> (value, rows, gradient)``, where ``moving`` tells of each leaf of each
            input whether its gradient is wanted, and the gradient has an array for each that is.
    """
    function: jax.custom_jvp[Any] = jax.custom_jvp(run)

    def rule(primals: Tree, tangents: Tree) -> tuple[Tree, Tree]:
        pairs = [list(zip(*map(jax.tree.leaves, pair), strict=True)) for pair in zip(primals, tangents, strict=True)]
        moving = [[_is_float(x) and not isinstance(t, SymbolicZero) for x, t in leaves] for leaves in pairs]
        value, rows, gradient = with_gradient(moving, *primals)
        moved = [t for x, t in itertools.chain(*pairs) if _is_float(x) and not isinstance(t, SymbolicZero)]
        return (value, rows), (inner_product(gradient, moved), jax.tree.map(_no_tangent, rows))

    function.defjvp(rule, symbolic_zeros=True)
    return function


def _is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def chosen(tree: Tree, which: list[bool]) -> tuple[list[jax.Array], Callable[[list[jax.Array]], Tree]]:
    """Some leaves of a pytree, and how to put others in their place."""
    leaves, structure = jax.tree.flatten(tree)
    flagged = list(zip(leaves, which, strict=True))

    def replace(others: list[jax.Array]) -> Tree:
        new = iter(others)
        return jax.tree.unflatten(structure, [next(new) if taken else x for x, taken in flagged])

    return [x for x, taken in flagged if taken], replace


def _no_tangent(x: jax.Array) -> Any:
    return jnp.zeros_like(x) if _is_float(x) else np.zeros(x.shape, jax.dtypes.float0)


def inner_product(x: Tree, y: Tree) -> jax.Array:
    """Sum of the products of all entries, in the dtype of ``x``."""
    products = jax.tree.map(lambda a, b: jnp.sum(a * b.astype(a.dtype)), x, y)
    return jnp.sum(jnp.stack(jax.tree.leaves(products)))


def length(tree: Tree) -> int:
    """Number of rows of a pytree."""
    return int(jax.tree.leaves(tree)[0].shape[0])


def split(anchors: Tree, block: int) -> tuple[Tree, jax.Array]:
    """Anchors in blocks, and which rows of the blocks are real: the last ones may be copies.

    A block takes rows in strides, not in a run: if the rows lie on several devices, each block lies on all of them.
    """
    n = length(anchors)
    number = -(-n // block)

    def strides(x: jax.Array) -> jax.Array:
        full = jnp.concatenate([x, x[: number * block - n]])
        return jnp.swapaxes(full.reshape(block, number, *x.shape[1:]), 0, 1)

    real = jnp.less(jnp.arange(number * block), n).reshape(block, number).T
    return jax.tree.map(strides, anchors), real


def join(rows: Tree, n: int) -> Tree:
    """Rows of all blocks in the order in which they came, without the copies."""
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:])[:n], rows)
