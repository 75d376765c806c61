"""What is measured: the losses, their inputs, and the JAX code that a good user would write instead."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
import optax
from jax.nn import logsumexp

import ntxent_jax as nj

TEMPERATURE = 0.07  # Another may be set before anything is measured.
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

Arrays = tuple[npt.NDArray[Any], ...]
Formula = Callable[..., Any]


class Loss(NamedTuple):
    """A loss of this package. The first ``wrt`` inputs are embeddings, and differentiated."""

    title: str
    inputs: Callable[[int, int, np.dtype[Any]], Arrays]
    ours: Formula
    wrt: int
    # Multiply-adds are two operations: the least work is `operations * n^2 * d`, see docs/benchmarks.md.
    operations: int


class Rival(NamedTuple):
    """Another system: its formula of each loss that it has, and the largest batch that it is asked for."""

    title: str
    framework: str
    max_rows: dict[str, int]
    formulas: dict[str, Formula]


# Inputs: two noisy views of each item, or noisy rows around the centre of their label ---------------------------------


def noisy(centres: npt.NDArray[np.float64], dtype: np.dtype[Any], seed: int) -> npt.NDArray[Any]:
    noise = np.random.default_rng(seed).standard_normal(centres.shape)
    return (centres + noise).astype(np.float32).astype(dtype)


def two_views(items: int, d: int, dtype: np.dtype[Any]) -> Arrays:
    centres = np.random.default_rng(0).standard_normal((items, d))
    return noisy(centres, dtype, 1), noisy(centres, dtype, 2)


def labelled(n: int, d: int, dtype: np.dtype[Any], classes: int) -> Arrays:
    labels = np.random.default_rng(3).permutation(np.arange(n) % classes).astype(np.int32)
    return noisy(np.random.default_rng(0).standard_normal((classes, d))[labels], dtype, 1), labels


def pairs_by_label(n: int, d: int, dtype: np.dtype[Any]) -> Arrays:
    return labelled(n, d, dtype, n // 2)


def ten_labels(n: int, d: int, dtype: np.dtype[Any]) -> Arrays:
    return labelled(n, d, dtype, 10)


LOSSES = {
    "views": Loss(
        "ntxent_views, two views, n rows in all",
        lambda n, d, dtype: two_views(n // 2, d, dtype),
        lambda a, b: nj.ntxent_views(a, b, temperature=TEMPERATURE),
        2,
        4,
    ),
    "pairs": Loss(
        "ntxent, two rows a label", pairs_by_label, lambda x, labels: nj.ntxent(x, labels, TEMPERATURE), 1, 4
    ),
    "classes": Loss("ntxent, ten labels", ten_labels, lambda x, labels: nj.ntxent(x, labels, TEMPERATURE), 1, 4),
    "supcon": Loss(
        "supcon_loss, ten labels", ten_labels, lambda x, labels: nj.supcon_loss(x, labels, TEMPERATURE), 1, 4
    ),
    "info_nce": Loss(
        "info_nce_loss, n queries and n keys",
        two_views,
        lambda a, b: nj.info_nce_loss(a, b, temperature=TEMPERATURE),
        2,
        6,
    ),
    "clip": Loss("clip_loss, n pairs", two_views, lambda a, b: nj.clip_loss(a, b, TEMPERATURE), 2, 8),
}


# Written by hand: the whole matrix of similarities from one product, then one pass of logsumexp ----------------------


def unit(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide / jnp.linalg.norm(wide, axis=1, keepdims=True)).astype(x.dtype)


def logits(x: jax.Array, y: jax.Array) -> jax.Array:
    precision = "highest" if x.dtype == jnp.float32 else None
    return jnp.matmul(x, y.T, precision=precision, preferred_element_type=jnp.float32) / TEMPERATURE


def own(x: jax.Array, y: jax.Array) -> jax.Array:
    """Logit of each row of ``x`` with the same row of ``y``, without a gather from the matrix."""
    return jnp.sum(x.astype(jnp.float32) * y.astype(jnp.float32), axis=1) / TEMPERATURE


def dense_views(a: jax.Array, b: jax.Array) -> jax.Array:
    a, b = unit(a), unit(b)
    x = jnp.concatenate([a, b])
    others = jnp.where(jnp.eye(len(x), dtype=bool), -jnp.inf, logits(x, x))
    return jnp.mean(logsumexp(others, axis=1)) - jnp.mean(own(a, b))


def positives(labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    same = labels[:, None] == labels
    return same, same & ~jnp.eye(len(labels), dtype=bool)


def dense_ntxent(x: jax.Array, labels: jax.Array) -> jax.Array:
    x = unit(x)
    s = logits(x, x)
    same, positive = positives(labels)
    negatives = logsumexp(jnp.where(same, -jnp.inf, s), axis=1, keepdims=True)
    # Not logaddexp: cosines at this temperature cannot overflow, and this is the fastest.
    return jnp.sum(jnp.where(positive, jnp.log1p(jnp.exp(negatives - s)), 0)) / jnp.sum(positive)


def dense_supcon(x: jax.Array, labels: jax.Array) -> jax.Array:
    x = unit(x)
    s = logits(x, x)
    _, positive = positives(labels)
    everyone = logsumexp(jnp.where(jnp.eye(len(x), dtype=bool), -jnp.inf, s), axis=1)
    return jnp.mean(everyone - jnp.sum(jnp.where(positive, s, 0), axis=1) / jnp.sum(positive, axis=1))


def dense_info_nce(a: jax.Array, b: jax.Array) -> jax.Array:
    a, b = unit(a), unit(b)
    return jnp.mean(logsumexp(logits(a, b), axis=1) - own(a, b))


def dense_clip(a: jax.Array, b: jax.Array) -> jax.Array:
    a, b = unit(a), unit(b)
    s = logits(a, b)
    return jnp.mean((logsumexp(s, axis=1) + logsumexp(s, axis=0)) / 2 - own(a, b))


def optax_ntxent(x: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.losses.ntxent(x, labels, TEMPERATURE)


def jax_rivals(dense_rows: int) -> dict[str, Rival]:
    dense = {
        "views": dense_views,
        "pairs": dense_ntxent,
        "classes": dense_ntxent,
        "supcon": dense_supcon,
        "info_nce": dense_info_nce,
        "clip": dense_clip,
    }
    by_optax = {"pairs": optax_ntxent, "classes": optax_ntxent}
    return {
        "dense": Rival("JAX by hand, whole matrix", "jax", dict.fromkeys(dense, dense_rows), dense),
        # It forms an array of n * n * d numbers.
        "optax": Rival("optax.losses.ntxent", "jax", dict.fromkeys(by_optax, 1024), by_optax),
    }
