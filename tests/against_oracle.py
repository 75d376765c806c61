"""A loss of the package against loops of :mod:`oracle_pairs`: value, and derivatives along all arguments at once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_pairs
from assertions import assert_close
from catalog import Case, along, moved, quick_jit

import ntxent_jax as nj

Floats = dict[str, Any]
SLOW = ("temperature", "weights", "label_smoothing", "class_prior", "hardness")


def ways(floats: Floats, number: int, seed: int = 99) -> list[Floats]:
    """Ways to move all floats; an entry that is 0 stays, since a weight of 0 is a jump."""
    rng = np.random.default_rng(seed)

    def way(name: str, x: Any) -> np.ndarray:
        return rng.normal(size=np.shape(x)) * (np.asarray(x) != 0) * (0.1 if name in SLOW else 1.0)

    return [{name: way(name, x) for name, x in floats.items()} for _ in range(number)]


def _one_number(value: Any) -> Any:
    """``"none"`` summed with uneven factors."""
    return (value * np.linspace(0.5, 2.0, value.shape[0])).sum() if jnp.ndim(value) else value


def package(case: Case, **static: Any) -> Any:
    def loss(floats: Floats, data: Any) -> tuple[Any, Any]:
        value = case(nj, floats, data, **static)
        return _one_number(value), value

    return loss


def right(case: Case, floats: Floats, *, frozen: bool = False, **static: Any) -> Any:
    """The oracle's; ``frozen``: what hardness and margin look at does not move."""
    kept = {"frozen": {name: case.floats[name] for name in case.rows}} if frozen else {}
    return case(oracle_pairs, floats, **static, **kept)


STREAMED = ({"block_size": None}, {"block_size": 3})


def blocks(*sizes: int | None) -> tuple[dict[str, Any], ...]:
    """Ways to run a loss."""
    return tuple({"block_size": size} for size in sizes)


def assert_right(
    case: Case, runs: tuple[dict[str, Any], ...] = STREAMED, *, frozen: bool = False, **static: Any
) -> None:
    """Value and slopes for every way to run it, and every entry of every gradient the same for all of them."""
    moves = ways(case.floats, 3)
    value = right(case, case.floats, **static)
    slopes = [
        oracle.gradient(
            lambda t, move=move: _one_number(right(case, moved(case.floats, (t, move)), frozen=frozen, **static)), 0.0
        )
        for move in moves
    ]
    first = None
    for run in runs:
        step = quick_jit(jax.value_and_grad(package(case, **run, **static), has_aux=True))
        (_, got), gradient = step(case.floats, case.data)
        assert got.shape == np.shape(value)
        assert_close(got, value, rtol=1e-11, name=f"value, {run}")
        assert_close([along(gradient, m) for m in moves], slopes, rtol=1e-8, atol=1e-9, name=f"slopes, {run}")
        for name, part in gradient.items():
            assert np.linalg.norm(part) > 1e-4, f"{name} has no gradient"
        first = gradient if first is None else first
        jax.tree.map(lambda x, y: assert_close(x, y, rtol=1e-10, atol=1e-13), gradient, first)


def assert_second_order(case: Case, run: dict[str, Any], **static: Any) -> None:
    """Forward over reverse and reverse over reverse agree, and are the oracle's differences."""
    u, v = ways(case.floats, 2)

    def loss(floats: Floats) -> Any:
        return package(case, **run, **static)(floats, case.data)[0]

    def products(floats: Floats) -> Any:
        forward = jax.jvp(jax.grad(loss), (floats,), (v,))[1]

        def inner(x: Floats) -> Any:
            return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, jax.grad(loss)(x), v)))

        return jax.jvp(loss, (floats,), (u,))[1], forward, jax.grad(inner)(floats)

    def value(s: Any, t: Any) -> Any:
        return _one_number(right(case, moved(case.floats, (s, u), (t, v)), **static))

    tangent, forward, reverse = quick_jit(products)(case.floats)
    assert_close(tangent, oracle.gradient(lambda s: value(s, 0.0), 0.0), rtol=1e-8, atol=1e-9)
    jax.tree.map(lambda x, y: assert_close(x, y, rtol=1e-9, atol=1e-12), forward, reverse)
    slope = lambda s: float(oracle.gradient(lambda t: value(s, t), 0.0, step=6e-3))  # noqa: E731
    assert_close(along(forward, u), oracle.gradient(slope, 0.0, step=6e-3), rtol=1e-6, atol=1e-7)
