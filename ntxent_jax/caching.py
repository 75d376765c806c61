"""An encoder run block by block, so that a contrastive batch may be larger than its activations allow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ntxent_jax import checks
from ntxent_jax.engine import map_rows, rows_per_block

Tree = Any
Encoder = Callable[..., Tree]


def gradient_cache(encode: Encoder, *, block_size: int) -> Encoder:
    r"""``encode`` with the activations of one block of rows in memory instead of those of the whole batch.

    A contrastive loss needs the embeddings of all rows at once, but not the activations that led to them. The function
    returned encodes the batch block by block and keeps the embeddings only. When a gradient is taken, each block is
    encoded again just before its part of the gradient is computed: the encoder runs forward twice, about 4/3 of the
    work of a training step, and the result is the same as in one pass up to rounding:

    .. math::
        \frac{\partial L}{\partial \theta}
        = \sum_{\text{blocks } b} \frac{\partial L}{\partial z_b} \frac{\partial z_b}{\partial \theta} .

    That is not the accumulation of gradients of smaller batches, whose losses have fewer negatives.

    Nothing is lost on the way: gradients flow to all that ``encode`` closes over, to the batch, and to what the loss
    has of its own, such as a learned temperature. Forward mode, second derivatives and ``vmap`` work. Gradients of
    half-precision parameters are summed over blocks in float32. Call it inside your jitted step: by hand, each call
    compiles again.

    Args:
        encode: A function ``encode(*batch)`` that returns embeddings, an array or a pytree of arrays with one row for
            each row of the batch. It closes over its parameters. Each row of its result must depend on the same row
            of the batch alone: statistics over the batch (batch normalisation in training mode) would be those of a
            block. What is random must come from the batch, one key for each row, so that the second run repeats the
            first. It is traced several times and must have no side effects.
        block_size: Largest number of rows encoded at once, > 0. The batch is cut into blocks of nearly equal size;
            where that does not work out, the last ones are filled up with copies of rows that add nothing.

    Returns:
        A function ``f(*batch)`` with the result of ``encode(*batch)``. Every argument is a pytree of arrays (typed
        keys too), all with the rows on axis 0.

    Raises:
        TypeError: ``encode`` is not a function, or ``block_size`` not an integer.
        ValueError: ``block_size`` is not positive; from ``f``: there is no argument, an array has no rows or
            another number of them than the others, or ``encode`` returns an array without one row for each of its own.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from ntxent_jax import info_nce_loss
        >>> weights, questions, answers = (
        ...     jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(16, 4), (100, 16), (100, 16)])
        ... )
        >>> def loss(weights, block_size):
        ...     encode = gradient_cache(lambda rows: jnp.tanh(rows @ weights), block_size=block_size)
        ...     return info_nce_loss(encode(questions), encode(answers), temperature=0.5)
        >>> whole, streamed = (jax.grad(loss)(weights, block_size) for block_size in (100, 32))
        >>> print(jnp.allclose(whole, streamed, atol=1e-6))
        True

        Dropout takes one key for each row; the same keys give the same result, whatever the block:

        >>> def encode(rows, keys):
        ...     keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.9, (16,)))(keys)
        ...     return jnp.tanh((rows * keep / 0.9) @ weights)
        >>> keys = jax.random.split(jax.random.key(3), 100)
        >>> streamed = gradient_cache(encode, block_size=32)(questions, keys)
        >>> print(jnp.allclose(encode(questions, keys), streamed, atol=1e-6))
        True

    References:
        Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", 2021,
        https://arxiv.org/abs/2101.06983. Here the blocks are rematerialised by ``jax.checkpoint`` instead of by hand.
    """
    if not callable(encode):
        raise TypeError(f"encode must be a function of the batch, got {encode!r}; close over the parameters")
    if block_size is None:
        raise ValueError("block_size must be an integer, got None; choose what the encoder's activations allow")
    checks.whole_number("block_size", block_size)

    def encode_in_blocks(*batch: Tree) -> Tree:
        batch = jax.tree.map(jnp.asarray, batch)
        n = _number_of_rows(batch)
        block = rows_per_block(n, 1, block_size)
        if block >= n:
            return _rows(encode(*batch), n)
        first = jax.tree.map(lambda x: x[:block], batch)
        closed, parameters = jax.closure_convert(encode, *first)
        dtypes = [x.dtype for x in parameters]

        def encode_block(rows: Tree, real: jax.Array, parameters: list[jax.Array]) -> Tree:
            own = [x.astype(dtype) for x, dtype in zip(parameters, dtypes, strict=True)]
            return _rows(closed(*rows, *own), block)

        return map_rows(encode_block, batch, [_wide(x) for x in parameters], block)

    return encode_in_blocks


def _wide(x: jax.Array) -> jax.Array:
    """Half precision as float32: the gradient is summed over blocks in the dtype of what it belongs to."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32)) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _number_of_rows(batch: Tree) -> int:
    """Length of axis 0, the same in all arrays of the batch."""
    arrays = jax.tree_util.tree_leaves_with_path(batch)
    if not arrays:
        raise ValueError("the function needs a batch, arrays with the rows on axis 0; parameters are closed over")
    lengths = {f"batch{jax.tree_util.keystr(path)}": x.shape[0] if x.ndim else None for path, x in arrays}
    first, n = next(iter(lengths.items()))
    odd = next((name for name, length in lengths.items() if length is None or length != n), None)
    if odd is not None:
        raise ValueError(
            "the arrays of the batch must all have the same number of rows on axis 0, got "
            f"{ {first: n, odd: lengths[odd]} } (None: no axis); close over what does not belong to rows"
        )
    return int(arrays[0][1].shape[0])


def _rows(embeddings: Tree, n: int) -> Tree:
    """What ``encode`` returned for ``n`` rows."""
    for x in jax.tree.leaves(embeddings):
        if jnp.shape(x)[:1] != (n,):
            raise ValueError(
                f"encode must return arrays with one row for each row of its batch, [{n}, ...], got shape "
                f"{list(jnp.shape(x))}"
            )
    return embeddings
