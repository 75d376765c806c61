"""Steps of training with what goes around a loss, each written once for one device and for many.

A step has weights, a device's rows and its queue, along an axis of length 1, and the options that make the loss one of
all devices; it returns losses, and gradients or new weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device_cases import DEVICES, LABELS, WHERE, D, N
from inputs import random_rows
from jax import lax

import ntxent_jax as nj

WEIGHTS = np.eye(D) + 0.3 * random_rows(D, D, seed=1)
ROWS = {
    "x": random_rows(N, D, seed=2),
    "y": random_rows(N, D, seed=3),
    "labels": LABELS.astype(np.int32),
    "where": WHERE,
}


def queues(number: int) -> nj.EmbeddingQueue:
    """Empty ones of some devices, with slots for more than all rows."""
    empty = nj.queue_init(4 * DEVICES // number, D, dtype=jnp.float64)
    return jax.tree.map(lambda x: jnp.stack([x] * number), empty)


def with_gradient_cache(w: Any, rows: Any, queue: Any, **options: Any) -> jax.Array:
    encode = nj.gradient_cache(lambda x: jnp.tanh(x @ w), block_size=2)
    return nj.info_nce_loss(encode(rows["x"]), encode(rows["y"]), temperature=0.5, where=rows["where"], **options)


def with_matryoshka(w: Any, rows: Any, queue: Any, **options: Any) -> jax.Array:
    loss = nj.matryoshka(nj.clip_loss, (2, D))
    return loss(jnp.tanh(rows["x"] @ w), jnp.tanh(rows["y"] @ w), 0.5, where=rows["where"], **options)


def with_queue(w: Any, rows: Any, queue: Any, **options: Any) -> jax.Array:
    """Each device keeps its own rows, here another number of them on each."""
    own = jax.tree.map(lambda x: x[0], queue)
    own = nj.queue_push(own, rows["y"], labels=rows["labels"], where=rows["where"])
    own = nj.queue_push(own, rows["x"][:1], labels=rows["labels"][:1], where=jnp.zeros(1, bool))
    candidates = {"candidates": own.embeddings, "candidate_labels": own.labels, "candidate_where": own.where}
    return nj.ntxent(jnp.tanh(rows["x"] @ w), rows["labels"], 0.5, **candidates, **options)


def rematerialised(w: Any, rows: Any, queue: Any, **options: Any) -> jax.Array:
    loss = jax.checkpoint(lambda w: nj.ntxent(jnp.tanh(rows["x"] @ w), rows["labels"], 0.5, **options))
    return loss(w)


def gradient_of(loss: Callable[..., jax.Array], average: Callable[[Any], Any], *args: Any, **options: Any) -> Any:
    value, gradient = jax.value_and_grad(lambda w: loss(w, *args[1:], **options))(args[0])
    return value, average(gradient)


def descent(loss: Callable[..., jax.Array], average: Callable[[Any], Any], *args: Any, **options: Any) -> Any:
    """Three steps in a loop."""

    def step(w: Any, _: None) -> Any:
        value, gradient = gradient_of(loss, average, w, *args[1:], **options)
        return w - gradient, value

    weights, values = lax.scan(step, args[0], length=3)
    return values, weights


STEPS = {
    "gradient cache": (gradient_of, with_gradient_cache),
    "matryoshka": (gradient_of, with_matryoshka),
    "queue": (gradient_of, with_queue),
    "rematerialised": (gradient_of, rematerialised),
    "descent": (descent, with_matryoshka),
}


def on_one(name: str) -> Any:
    run, loss = STEPS[name]
    return jax.jit(lambda w, rows, queue: run(loss, lambda x: x, w, rows, queue))(WEIGHTS, ROWS, queues(1))


def on_each(name: str, axis: Any, weights: Any, rows: Any, queue: Any, **options: Any) -> Any:
    run, loss = STEPS[name]
    return run(loss, lambda x: lax.pmean(x, axis), weights, rows, queue, **options)
