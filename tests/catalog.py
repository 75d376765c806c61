"""Every public loss with all of its options on, to be called on the package or on the oracle.

Logits are of order 1, so that a padded column left unmasked, a dropped factor or a wrong divisor shows. Sizes are
primes that no block divides.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle

import ntxent_jax as nj

# Most of the time of a test goes into compiling programs that run once: without optimisation it is a third less.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

N, M, K, D = 7, 11, 2, 3
BLOCK = 3
ALL_BLOCKS = (None, 1, BLOCK, N - 1, N, N + 5)
REDUCTIONS = ("mean", "anchor_mean", "sum", "none")


class Case(NamedTuple):
    """A loss and its arguments: ``floats`` have a gradient, ``data`` have none, ``static`` are decided beforehand."""

    loss: str
    rows: tuple[str, ...]  # The positional arguments, in order.
    floats: dict[str, np.ndarray]
    data: dict[str, np.ndarray]
    static: dict[str, Any] = {}  # noqa: RUF012
    similarity: str | None = None

    def __call__(self, library: Any, floats: Any, data: Any = None, **static: Any) -> Any:
        arguments = {**floats, **(self.data if data is None else data), **self.static, **static}
        if self.similarity:
            arguments.setdefault("similarity", getattr(library, self.similarity))
        rows = [arguments.pop(name) for name in self.rows]
        return getattr(library, self.loss)(*rows, **arguments)


def _random(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


WHERE = np.array([True, True, False, True, True, True, True])
WEIGHTS = np.array([1.0, 0.5, 2.0, 1.5, 0.0, 3.0, 0.7])
LABELS = np.array([3, 3, 3, 3, 8, 3, -1])  # 2, 2, -, 3, 0, 3 and 0 positives; row 2 is padding.
IDS = np.array([0, 0, 1, 2, 3, 4, 5])  # Rows 0 and 1 are the same thing.
KEY_IDS = np.array([5, 0, 1, 2, 0, 4, 9, 3, 5, 8, 8])
TEMPERATURES = np.linspace(0.4, 1.1, N)


def _some(size: tuple[int, ...]) -> np.ndarray:
    """Most negatives are real, those of the padded row too: that row hides them."""
    return (_random(12).random(size) < 0.6) | (np.arange(size[0]) == 2).reshape(-1, *[1] * (len(size) - 1))


def _per_item(seed: int = 0) -> dict[str, np.ndarray]:
    return {"temperature": _random(seed).permutation(TEMPERATURES), "weights": WEIGHTS}


def _labelled(loss: str, *, candidates: bool = False, similarity: str | None = None, **static: Any) -> Case:
    floats = {"embeddings": _random(1).normal(size=(N, D)), **_per_item()}
    data = {"labels": LABELS, "where": WHERE, "ids": IDS}
    if candidates:
        floats["candidates"] = _random(2).normal(size=(M, D))
        data["candidate_labels"] = np.array([3, -1, 3, 8, 3, -1, 7, 7, 3, 8, -1])
        data["candidate_where"] = np.arange(M) % 5 != 3
        data["candidate_ids"] = KEY_IDS
    return Case(loss, ("embeddings", "labels"), floats, data, static, similarity)


def _item_views(loss: str, **static: Any) -> Case:
    floats = {"embeddings": _random(3).normal(size=(N, 2, D)), **_per_item()}
    return Case(loss, ("embeddings", "labels"), floats, {"labels": LABELS, "where": WHERE}, static)


def _views(number: int, loss: str = "ntxent_views", names: str = "view_{}", **static: Any) -> Case:
    rows = tuple(names.format("abc"[i]) for i in range(number))
    floats = {name: _random(4 + i).normal(size=(N, D)) for i, name in enumerate(rows)}
    return Case(loss, rows, {**floats, **_per_item()}, {"where": WHERE}, static)


def _queries(negatives: str | None, *, rich: bool = True, **static: Any) -> Case:
    """``negatives``: "own", "shared" or None. ``rich``: more keys than queries, and every option."""
    m = M if rich and static.get("in_batch", True) else N
    floats = {"queries": _random(7).normal(size=(N, D)), "keys": _random(8).normal(size=(m, D)), **_per_item()}
    data = {"where": WHERE, "ids": IDS, "key_ids": KEY_IDS[:m]}
    if rich:
        floats["key_bias"] = _random(9).normal(size=m)
        data["key_where"] = np.arange(m) % 10 != 5  # Query 5 has no positive.
        data["pair_where"] = _random(10).random((N, m)) < 0.7
    if negatives:
        size = (N, K) if negatives == "own" else (K + 1,)
        floats["negatives"] = _random(11).normal(size=(*size, D))
        if rich:
            data["negative_where"] = _some(size)
    rows = ("queries", "keys", "negatives") if negatives else ("queries", "keys")
    return Case("info_nce_loss", rows, floats, data, static)


def _ranking(negatives: str | None, similarity: str | None = None) -> Case:
    floats = {"anchors": _random(13).normal(size=(N, D)), "positives": _random(14).normal(size=(N, D)), **_per_item()}
    floats["key_bias"] = _random(15).normal(size=N)
    data = {"where": WHERE, "ids": IDS}
    if negatives:
        size = (N, K) if negatives == "own" else (K + 1,)
        floats["negatives"] = _random(16).normal(size=(*size, D))
        data["negative_where"] = _some(size)
    rows = ("anchors", "positives", "negatives") if negatives else ("anchors", "positives")
    return Case("multiple_negatives_ranking_loss", rows, floats, data, {}, similarity)


CASES = {
    "ntxent": _labelled("ntxent"),
    "ntxent all": _labelled("ntxent", denominator="all"),
    "ntxent negatives": _labelled("ntxent", denominator="negatives"),
    "ntxent candidates": _labelled("ntxent", candidates=True),
    "ntxent candidates all": _labelled("ntxent", candidates=True, denominator="all", similarity="dot_product"),
    "ntxent candidates negatives": _labelled("ntxent", candidates=True, denominator="negatives"),
    "ntxent items": _item_views("ntxent"),
    "supcon out": _labelled("supcon_loss"),
    "supcon in": _labelled("supcon_loss", form="in"),
    "supcon out candidates": _labelled("supcon_loss", candidates=True, similarity="negative_euclidean_distance"),
    "supcon in candidates": _labelled("supcon_loss", candidates=True, form="in"),
    "supcon items": _item_views("supcon_loss"),
    "two views": _views(2),
    "two views negatives": _views(2, denominator="negatives"),
    "three views": _views(3),
    "three views all": _views(3, denominator="all"),
    "instance": _views(2, "instance_loss"),
    "info_nce": _queries(None),
    "info_nce own": _queries("own"),
    "info_nce own plain": _queries("own", rich=False),
    "info_nce shared": _queries("shared"),
    "info_nce only own": _queries("own", in_batch=False),
    "info_nce only shared": _queries("shared", in_batch=False),
    "ranking": _ranking(None, "log1p_cosine_similarity"),
    "ranking own": _ranking("own"),
    "ranking shared": _ranking("shared", "dot_product"),
}
# One of each formula, with as many of its paths as one call can take.
SOME_CASES = [
    "ntxent",
    "ntxent candidates negatives",
    "supcon in candidates",
    "three views all",
    "instance",
    "info_nce own",
    "ranking own",
]


def directions(name: str, number: int) -> list[dict[str, np.ndarray]]:
    """Ways to move all floats of a case at once; a weight of 0 stays, since there the loss jumps."""
    rng = _random(99)
    moves = [{key: rng.normal(size=x.shape) * (x != 0) for key, x in CASES[name].floats.items()} for _ in range(number)]
    return [{key: 0.2 * x if key in ("temperature", "weights") else x for key, x in move.items()} for move in moves]


def moved(floats: dict[str, np.ndarray], *steps: tuple[Any, dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {key: x + sum(size * move[key] for size, move in steps) for key, x in floats.items()}


def along(gradient: dict[str, Any], move: dict[str, np.ndarray]) -> float:
    return sum(float(np.vdot(np.asarray(gradient[key]), x)) for key, x in move.items())


def total(name: str, library: Any, floats: Any, data: Any = None, **static: Any) -> Any:
    """The loss as one number; ``"none"`` summed with uneven factors."""
    value = CASES[name](library, floats, data, **static)
    return (value * FACTORS).sum() if jnp.ndim(value) else value


FACTORS = np.linspace(0.5, 2.0, N)


@functools.cache
def outcome(name: str, reduction: str, block_size: int | None) -> Any:
    """Value and gradients of the package, in float64."""

    def loss(floats, data):
        value = CASES[name](nj, floats, data, reduction=reduction, block_size=block_size)
        return (value if value.ndim == 0 else jnp.vdot(value, FACTORS)), value

    (_, value), gradient = quick_jit(jax.value_and_grad(loss, has_aux=True))(CASES[name].floats, CASES[name].data)
    return jax.tree.map(np.asarray, (value, gradient))


@functools.cache
def expected(name: str, reduction: str) -> tuple[Any, list[float]]:
    """The oracle's value, and its derivatives along ``directions(name, 4)``."""
    case = CASES[name]
    slopes = [
        oracle.gradient(
            lambda t, move=move: total(name, oracle, moved(case.floats, (t, move)), reduction=reduction), 0.0
        )
        for move in directions(name, 4)
    ]
    return case(oracle, case.floats, reduction=reduction), [float(slope) for slope in slopes]
