"""A queue of earlier embeddings, to choose among more candidates than one batch has rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ntxent_jax import checks
from ntxent_jax.devices import on_any_mesh_as, split_of


class EmbeddingQueue(NamedTuple):
    """The last rows pushed, as arrays of fixed shape: a pytree that goes through ``jit``, ``scan`` and checkpoints.

    The losses take it as candidates: ``candidates=queue.embeddings, candidate_labels=queue.labels,
    candidate_where=queue.where``, or ``negatives=queue.embeddings, negative_where=queue.where``.

    Attributes:
        embeddings: Rows, shape ``[size, dim]``; 0 in a slot never written.
        labels: Integer label or id of each row, shape ``[size]``; -1 (0 if unsigned) where none was given.
        where: Boolean, shape ``[size]``. True for a slot that holds a row.
        position: Slot that the next row goes to, int32, shape ``[]``, from 0 to ``size - 1``. In a full queue it holds
            the oldest row.
    """

    embeddings: jax.Array
    labels: jax.Array
    where: jax.Array
    position: jax.Array


def queue_init(size: int, dim: int, *, dtype: DTypeLike, label_dtype: DTypeLike = jnp.int32) -> EmbeddingQueue:
    """An empty queue: every slot has ``where=False``, so a loss that gets ``where`` sees none of them.

    Args:
        size: Number of rows kept, > 0.
        dim: Number of features of a row, > 0.
        dtype: Floating dtype in which the rows are kept. The losses compute in float32 at least, so bfloat16 halves the
            memory and costs a rounding of each row.
        label_dtype: Integer dtype of the labels or ids. The labels pushed must fit it.

    Returns:
        An :class:`EmbeddingQueue`. It takes ``size * dim`` numbers of ``dtype``: 33 MB for 65,536 float32 rows of 128.

    Raises:
        TypeError: ``size`` or ``dim`` is not an integer, ``dtype`` is not floating, or ``label_dtype`` not an integer
            dtype.
        ValueError: ``size`` or ``dim`` is below 1, or JAX would replace a dtype by a smaller one.

    Example:
        >>> import jax.numpy as jnp
        >>> queue = queue_init(65_536, 128, dtype=jnp.float32)
        >>> print(queue.embeddings.shape, queue.labels.dtype, int(queue.where.sum()), int(queue.position))
        (65536, 128) int32 0 0

    References:
        He et al., "Momentum Contrast for Unsupervised Visual Representation Learning", 2020,
        https://arxiv.org/abs/1911.05722, section 3.2.
    """
    checks.whole_number("size", size)
    checks.whole_number("dim", dim)
    row_dtype = _dtype("dtype", dtype)
    integer_dtype = _dtype("label_dtype", label_dtype)
    return EmbeddingQueue(
        jnp.zeros((size, dim), row_dtype),
        jnp.full(size, 0 if _unsigned(integer_dtype) else -1, integer_dtype),
        jnp.zeros(size, jnp.bool_),
        jnp.zeros((), jnp.int32),
    )


def _split_as_queue(queue: EmbeddingQueue, *_: ArrayLike, **__: ArrayLike | None) -> Any:
    return jax.tree.map(split_of, queue)


@on_any_mesh_as(_split_as_queue)
def queue_push(
    queue: EmbeddingQueue,
    embeddings: ArrayLike,
    *,
    labels: ArrayLike | None = None,
    where: ArrayLike | None = None,
) -> EmbeddingQueue:
    r"""The queue with the real rows of a batch in the place of its oldest rows.

    Rows with ``where=False`` are dropped and take no slot. Of the others the last ``size`` are written, in order, from
    slot ``position`` on and around the end, and ``position`` moves on by the number of rows written. No gradient flows
    into a queue, neither through the rows pushed nor through those it holds.

    Compute the loss first and push afterwards. A key that already lies in the queue is a negative of its own query,
    unless ids say that both are the same thing.

    Shapes never change, so it works under ``jit`` and as the carry of ``lax.scan``. Donate the queue
    (``jax.jit(step, donate_argnums=...)``) and its rows are overwritten in place instead of copied.

    Args:
        queue: What :func:`queue_init` or an earlier push returned.
        embeddings: Rows, floating, shape ``[n, dim]``; kept in the queue's dtype. ``n`` may exceed ``size``.
        labels: Integer or boolean, shape ``[n]``: the labels of the rows, or ids by which to find false negatives.
            Default: -1 for each, which to a loss is a label like any other, so push labels always or never.
        where: Boolean, shape ``[n]``. False drops a row (padding), whatever it holds. Default: all are real.

    Returns:
        A new :class:`EmbeddingQueue` of the same shapes and dtypes.

    Raises:
        TypeError: ``queue`` is none, the rows are not floating, the labels not integers or of a dtype that the queue's
            labels cannot hold, or ``where`` is not boolean.
        ValueError: A shape is wrong, or rows without labels are pushed into a queue of unsigned labels.

    Example:
        Size 4, three pushes of 3, 3 and 5 rows. The second wraps around, of the third only the last 4 rows fit:

        >>> import jax
        >>> import jax.numpy as jnp
        >>> queue = queue_init(4, 1, dtype=jnp.float32)
        >>> push = jax.jit(queue_push)
        >>> for rows in ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0, 10.0, 11.0]):
        ...     queue = push(queue, jnp.array(rows)[:, None])
        ...     print(queue.embeddings[:, 0], queue.where.sum(), queue.position)
        [1. 2. 3. 0.] 3 3
        [5. 6. 3. 4.] 4 2
        [10. 11.  8.  9.] 4 2

        Padding takes no slot:

        >>> rows = jnp.array([[12.0], [jnp.nan], [13.0]])
        >>> queue = push(queue, rows, labels=jnp.array([5, 0, 6]), where=jnp.array([True, False, True]))
        >>> print(queue.embeddings[:, 0], queue.labels)
        [10. 11. 12. 13.] [-1 -1  5  6]

    References:
        He et al., "Momentum Contrast for Unsupervised Visual Representation Learning", 2020,
        https://arxiv.org/abs/1911.05722, section 3.2. Wang et al., "Cross-Batch Memory for Embedding Learning", 2020,
        https://arxiv.org/abs/1912.06798, section 3.2.
    """
    queue = _checked(queue)
    rows = checks.rows("embeddings", embeddings, "[n, dim]")
    if rows.shape[1] != queue.embeddings.shape[1]:
        raise ValueError(
            f"embeddings must have {queue.embeddings.shape[1]} features like the rows of the queue, got shape "
            f"{list(rows.shape)}"
        )
    n = rows.shape[0]
    own_labels, real = _labels(labels, n, queue.labels.dtype), checks.mask("where", where, (n,))
    pushed: EmbeddingQueue = _pushed(queue, rows, own_labels, real)
    return pushed


@jax.jit
def _pushed(queue: EmbeddingQueue, rows: jax.Array, labels: jax.Array, where: jax.Array | None) -> EmbeddingQueue:
    """Write the real rows, the last ``size`` of them."""
    real = jnp.ones(rows.shape[0], jnp.bool_) if where is None else where
    size = queue.where.shape[0]
    number = jnp.cumsum(real, dtype=jnp.int32) - 1  # Of a real row among the real rows.
    total = jnp.sum(real, dtype=jnp.int32)
    first = jnp.maximum(total - size, 0)
    # `size` is no slot: what is sent there is dropped. No two rows are sent to one slot.
    slot = jnp.where(real & (number >= first), (queue.position + number - first) % size, size)

    def written(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[slot].set(new.astype(old.dtype), mode="drop")

    return EmbeddingQueue(
        lax.stop_gradient(written(queue.embeddings, lax.stop_gradient(rows))),
        written(queue.labels, labels),
        written(queue.where, real),
        (queue.position + total - first) % size,
    )


def _checked(queue: EmbeddingQueue) -> EmbeddingQueue:
    """A queue of JAX arrays, also where it came from a checkpoint as NumPy arrays."""
    if not isinstance(queue, EmbeddingQueue):
        raise TypeError(
            f"queue must be an EmbeddingQueue, got {type(queue).__name__}; make one with queue_init, or from the "
            "fields of a checkpoint with EmbeddingQueue(**fields)"
        )
    rows = checks.rows("queue.embeddings", queue.embeddings, "[size, dim]")
    size = rows.shape[:1]
    where = checks.mask("queue.where", queue.where, size)
    assert where is not None
    position = checks.integers("queue.position", queue.position, ()).astype(jnp.int32)
    return EmbeddingQueue(rows, checks.integers("queue.labels", queue.labels, size), where, position)


def _labels(labels: ArrayLike | None, n: int, dtype: jnp.dtype) -> jax.Array:
    """Labels ``[n]`` that the queue's dtype holds exactly."""
    if labels is None:
        if _unsigned(dtype):
            raise ValueError(
                f"labels must be given to a queue of {dtype} labels, which cannot hold the -1 of a row without one; "
                "pass labels, or give queue_init a signed label_dtype"
            )
        return jnp.full(n, -1, dtype)
    result = checks.integers("labels", labels, (n,))
    if not np.can_cast(result.dtype, dtype, "safe"):
        raise TypeError(
            f"labels ({result.dtype}) do not fit the queue's labels ({dtype}); convert them with .astype, or make the "
            f"queue with queue_init(..., label_dtype=jnp.{result.dtype})"
        )
    return result


def _dtype(name: str, value: DTypeLike) -> jnp.dtype:
    """A dtype that JAX has at present: an integer one for the labels, a floating one for the rows."""
    dtype, of_labels = jnp.dtype(value), name == "label_dtype"
    if not jnp.issubdtype(dtype, jnp.integer if of_labels else jnp.floating):
        raise TypeError(f"{name} must be {'an integer' if of_labels else 'a floating'} dtype, got {dtype}")
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(f"{name}={dtype} needs jax.config.update('jax_enable_x64', True)")
    return dtype


def _unsigned(dtype: jnp.dtype) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.unsignedinteger))
