"""Fixtures of all tests. The suite runs on CPU unless JAX_PLATFORMS says otherwise."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiling is nearly all of the time of the suite, and with full optimisation it takes twice as long. JAX's own test
# suite does the same. Set it to 0 to test optimised code.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import contextlib
import gc
import importlib.metadata

if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] != "0":
    version = tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2]))
    # XLA's older way to write kernels takes a third of the time. 0.12 has it no more, and XLA ends a process that sets
    # a flag which it does not know.
    if version < (0, 11):
        quick = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
        os.environ["XLA_FLAGS"] = f"{quick} {os.environ.get('XLA_FLAGS', '')}"

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
