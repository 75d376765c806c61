"""Embeddings that may be cut short: a loss over several prefixes of the features."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ntxent_jax import checks

Loss = Callable[..., jax.Array]


def matryoshka(loss: Loss, dims: Sequence[int], weights: ArrayLike | Sequence[float] | None = None) -> Loss:
    r"""``loss`` summed over prefixes of the embeddings, so that they may be cut short after training.

    With :math:`x_{:k}` the first :math:`k` features of each row,

    .. math::
        L(x) = \sum_i w_i \, \ell(x_{: d_i}) .

    Each prefix is compared anew: the cosine of two prefixes divides by the norms of the prefixes, not of the rows.

    What is cut to ``[..., :dim]`` is every floating array among the arguments, positional or keyword, of rank 2 or more
    whose last axis is as long as that of the first argument: queries, keys, negatives, candidates, a queue, and the
    rows of a guide model if they happen to be as wide. Labels, masks, weights and temperatures are left as they are.

    sentence-transformers' ``MatryoshkaLoss`` is the same sum with the same default weights.

    Args:
        loss: A function of embeddings such as :func:`ntxent`, :func:`info_nce_loss` or one of your own. A similarity
            with weights of its own must accept every prefix.
        dims: Lengths of the prefixes, positive ints, at most the number of features. The full length counts only if it
            is among them. Time grows with their number; the longest one alone sets the memory.
        weights: Weight of each prefix, shape ``[len(dims)]``. May be traced. Default: all 1.

    Returns:
        A function with the arguments of ``loss``. Its value is a sum, so it grows with the number of prefixes.

    Raises:
        TypeError: ``loss`` is not a function, or an entry of ``dims`` not an int; from the function returned: its first
            argument is not floating.
        ValueError: ``dims`` is empty, an entry is < 1, or ``weights`` has another length; from the function returned:
            its first argument is of rank below 2, or has fewer features than the longest prefix.

    Example:
        >>> import jax.numpy as jnp
        >>> from ntxent_jax import ntxent
        >>> embeddings = jnp.array([[1.0, 0.0, 0.6], [0.8, 0.6, 0.0], [0.0, 1.0, 0.0], [0.0, 0.6, 0.8]])
        >>> labels = jnp.array([0, 0, 1, 1])
        >>> loss = matryoshka(ntxent, [3, 2], weights=[1.0, 0.5])
        >>> print(f"{loss(embeddings, labels, temperature=0.5):.4f}")
        1.0471
        >>> full, prefix = (ntxent(embeddings[:, :dim], labels, temperature=0.5) for dim in (3, 2))
        >>> print(f"{full + 0.5 * prefix:.4f}")
        1.0471

    References:
        Kusupati et al., "Matryoshka Representation Learning", 2022, https://arxiv.org/abs/2205.13147, eq. 1.
    """
    if not callable(loss):
        raise TypeError(f"loss must be a function of embeddings, got {loss!r}")
    lengths = _lengths(dims)
    given = None if weights is None else checks.array("weights", weights)
    factors = checks.numbers("weights", given, (len(lengths),), each="prefix")
    factors = jnp.ones(len(lengths)) if factors is None else factors

    @functools.wraps(loss)
    def summed(*args: Any, **kwargs: Any) -> jax.Array:
        features = _features(loss, args, kwargs, max(lengths))
        values = [loss(*_cut(args, features, dim), **_cut(kwargs, features, dim)) for dim in lengths]
        terms: list[jax.Array] = [value * w.astype(value.dtype) for value, w in zip(values, factors, strict=True)]
        return functools.reduce(operator.add, terms)

    return summed


def _lengths(dims: object) -> tuple[int, ...]:
    """Lengths of the prefixes."""
    if not isinstance(dims, list | tuple | range | np.ndarray):
        raise TypeError(f"dims must be a sequence of ints, the lengths of the prefixes, got {dims!r}; pass [{dims}]")
    if len(dims) == 0:
        raise ValueError("dims must hold at least one length; pass for instance [256, 64]")
    for dim in dims:
        if not isinstance(dim, int | np.integer) or isinstance(dim, bool):
            raise TypeError(f"dims must be ints, the lengths of the prefixes, got {dims!r}")
        if dim < 1:
            raise ValueError(f"dims must be at least 1, got {dims!r}")
    return tuple(int(dim) for dim in dims)


def _features(loss: Loss, args: tuple[Any, ...], kwargs: dict[str, Any], longest: int) -> int:
    """Number of features of the first argument of ``loss``, however it was passed."""
    name = next(iter(inspect.signature(loss).parameters), "")
    if not args and name not in kwargs:
        raise ValueError(f"the loss needs its embeddings ({name}) as first argument, got {sorted(kwargs)}")
    x = checks.floating(name, args[0] if args else kwargs[name])
    if x.ndim < 2:
        raise ValueError(f"{name} must have rank 2 or more, rows of features, got shape {list(x.shape)}")
    if longest > x.shape[-1]:
        raise ValueError(f"dims must be at most {x.shape[-1]}, the number of features of {name}, got {longest}")
    return int(x.shape[-1])


def _cut(arguments: Any, features: int, dim: int) -> Any:
    """The arguments, a tuple or a dict, with every floating array of ``features`` columns cut to ``dim``."""

    def cut(x: Any) -> Any:
        if not (isinstance(x, jax.Array | np.ndarray) or hasattr(x, "__jax_array__")):
            return x
        x = jnp.asarray(x)
        rows = jnp.issubdtype(x.dtype, jnp.floating) and x.ndim >= 2 and x.shape[-1] == features
        return x[..., :dim] if rows else x

    if isinstance(arguments, dict):
        return {name: cut(x) for name, x in arguments.items()}
    return tuple(cut(x) for x in arguments)
