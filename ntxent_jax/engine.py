"""How a function of whole rows is run: all anchors at once, or block by block with memory linear in their number.

A *row function* ``f(anchors, real, candidates)`` sees some anchors (a pytree whose arrays all start with the anchors'
axis), which of them are real (boolean, shape ``[b]``) and all candidates. The engine knows nothing else about losses.

Streamed, the anchors are visited in blocks under ``lax.scan``. A block sees whole rows of the ``[n, m]`` matrix, so its
part of the sum and the derivative of that part come out of one visit, and no array of that size ever exists.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ntxent_jax.numerics import compute_dtype

Tree = Any
SumFunction = Callable[..., tuple[jax.Array, Tree]]
MapFunction = Callable[..., Tree]

# Scores held at once when the user gives no block size: a few megabytes, so that a block's passes stay in cache.
_SCORES = 1 << 20


def rows_per_block(n: int, m: int, block_size: int | None) -> int:
    """Number of anchors visited at once: at most the user's, in blocks of nearly equal size."""
    if n == 0:
        return 0
    most = max(1, _SCORES // max(m, 1)) if block_size is None else block_size
    number_of_blocks = -(-n // most)
    return -(-n // number_of_blocks)


def sum_over_rows(f: SumFunction, anchors: Tree, candidates: Tree, block: int) -> tuple[jax.Array, Tree]:
    """Sum of the scalars that ``f`` returns first; the rows that it returns second, which have no derivative."""
    n = length(anchors)
    if block >= n:
        return f(anchors, jnp.ones(n, jnp.bool_), candidates)
    blocks = split(anchors, block)
    f, closed_over = jax.closure_convert(f, *jax.tree.map(lambda x: x[0], blocks), candidates)
    total, rows = _streamed_sum(f)(blocks, (candidates, *closed_over))
    return total, join(rows, n)


def map_rows(f: MapFunction, anchors: Tree, candidates: Tree, block: int) -> Tree:
    """Rows that ``f`` returns, with derivative: in reverse mode a block is computed again instead of stored."""
    n = length(anchors)
    if block >= n:
        return f(anchors, jnp.ones(n, jnp.bool_), candidates)
    rows = lax.map(jax.checkpoint(lambda own: f(*own, candidates)), split(anchors, block))
    return join(rows, n)


def _streamed_sum(f: SumFunction) -> SumFunction:
    """``f`` summed over blocks, with a derivative that is found in the same visits as the value.

    Its tangent is the inner product of that derivative with the tangents of the inputs, which JAX can transpose, vmap
    and differentiate again in either mode; a custom_vjp would forbid forward mode.
    """

    @jax.custom_jvp
    def run(blocks: Tree, shared: Tree) -> tuple[jax.Array, Tree]:
        values, rows = lax.map(lambda own: f(*own, *shared), blocks)
        return jnp.sum(values), rows

    @run.defjvp
    def run_with_derivative(primals: Tree, tangents: Tree) -> tuple[Tree, Tree]:
        blocks, shared = primals
        shared_floats, with_shared = floats(shared)

        def visit(gradient: list[jax.Array], own: Tree) -> tuple[list[jax.Array], Tree]:
            own_floats, with_own = floats(own)
            value, pull_back, rows = jax.vjp(
                lambda x, y: f(*with_own(x), *with_shared(y)), own_floats, shared_floats, has_aux=True
            )
            of_own, of_shared = pull_back(jnp.ones_like(value))
            return [total + g for total, g in zip(gradient, of_shared, strict=True)], (value, rows, of_own)

        start = [jnp.zeros_like(x, dtype=compute_dtype(x)) for x in shared_floats]
        of_shared, (values, rows, of_blocks) = lax.scan(visit, start, blocks)
        tangent = inner_product([*of_blocks, *of_shared], moved(primals, tangents))
        return (jnp.sum(values), rows), (tangent, jax.tree.map(_no_tangent, rows))

    return run


def _is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def floats(tree: Tree) -> tuple[list[jax.Array], Callable[[list[jax.Array]], Tree]]:
    """The floating leaves of a pytree, and how to put others in their place."""
    leaves, structure = jax.tree.flatten(tree)

    def replace(others: list[jax.Array]) -> Tree:
        new = iter(others)
        return jax.tree.unflatten(structure, [next(new) if _is_float(x) else x for x in leaves])

    return [x for x in leaves if _is_float(x)], replace


def moved(primals: Tree, tangents: Tree) -> list[jax.Array]:
    """Tangents of the floating leaves of the primals."""
    pairs = zip(jax.tree.leaves(primals), jax.tree.leaves(tangents), strict=True)
    return [t for x, t in pairs if _is_float(x)]


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
