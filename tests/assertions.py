"""Comparisons. Each raises AssertionError with what came and what was expected."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

# Values written with 10 decimals, the last of which may be off where they are differences.
STATED = {"rtol": 1e-9, "atol": 5e-10}


def _host(value: Any) -> np.ndarray:
    value = np.asarray(value)
    return value.astype(np.float64)


def assert_close(actual: Any, expected: Any, *, rtol: float = 1e-10, atol: float = 1e-12, name: str = "") -> None:
    np.testing.assert_allclose(_host(actual), _host(expected), rtol=rtol, atol=atol, err_msg=name)


def assert_states(actual: Any, expected: Any) -> None:
    """Equal to a value written with 10 decimals; float32 results are held to float32."""
    dtype = np.asarray(actual).dtype
    tolerance = STATED if dtype == np.float64 else {"rtol": 5e-6, "atol": 1e-7}
    assert_close(actual, expected, **tolerance)


def assert_finite(*trees: Any) -> None:
    for leaf in jax.tree.leaves(trees):
        assert np.all(np.isfinite(_host(leaf))), f"not finite: {leaf}"


def assert_zero(*trees: Any) -> None:
    """Exactly 0 everywhere, so neither NaN nor a small number."""
    for leaf in jax.tree.leaves(trees):
        assert np.all(_host(leaf) == 0), f"not exactly 0: {leaf}"


def assert_nan(*trees: Any) -> None:
    for leaf in jax.tree.leaves(trees):
        assert np.all(np.isnan(_host(leaf))), f"not NaN: {leaf}"


def assert_no_nan(*trees: Any) -> None:
    for leaf in jax.tree.leaves(trees):
        assert not np.any(np.isnan(_host(leaf))), f"NaN: {leaf}"


def assert_same_direction(actual: Any, expected: Any, *, tolerance: float = 1e-9) -> None:
    """Cosine 1 and equal length: a gradient may have the right length and point elsewhere."""
    actual, expected = _host(actual).ravel(), _host(expected).ravel()
    cosine = actual @ expected / (np.linalg.norm(actual) * np.linalg.norm(expected))
    assert abs(cosine - 1) < tolerance, f"cosine {cosine}"
    assert abs(np.linalg.norm(actual) / np.linalg.norm(expected) - 1) < tolerance, "another length"
