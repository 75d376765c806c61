"""Fixtures of all tests. The suite runs on CPU unless JAX_PLATFORMS says otherwise."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import contextlib
import gc

import jax
import pytest

# Tracing makes many long-lived objects, and looking for cycles among them again and again takes minutes of the suite.
gc.set_threshold(100_000, 50, 50)


@pytest.fixture(autouse=True, scope="module")
def no_programs_of_other_modules():
    """Free the compiled programs of a module after its tests: thousands of them would fill the memory."""
    yield
    jax.clear_caches()


def double_precision() -> contextlib.AbstractContextManager:
    """JAX's float64 switch as a context, whatever its place in this version of JAX."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64

    return enable_x64()


@pytest.fixture
def x64():
    """Run the test in float64. Module wide: ``pytestmark = pytest.mark.usefixtures("x64")``."""
    with double_precision():
        yield
