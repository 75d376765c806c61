"""Fixtures of all tests. The suite runs on CPU unless JAX_PLATFORMS says otherwise."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiling is nearly all of the time of the suite, and with full optimisation it takes twice as long. JAX's own test
# suite does the same. Set it to 0 to test optimised code.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import contextlib
import gc
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


class SimulatedDevices:
    """A process with eight simulated devices that answers questions; see ``on_devices.py``."""

    def __init__(self, errors: Any) -> None:
        flags = f"--xla_force_host_platform_device_count=8 {os.environ.get('XLA_FLAGS', '')}"
        self.errors = errors
        self.process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("on_devices.py")],
            env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )

    def __call__(self, function: str, *arguments: Any, seconds: float = 240) -> Any:
        """What a function of ``on_devices.py`` returns."""
        end = threading.Timer(seconds, self.process.kill)
        end.start()
        try:
            self.process.stdin.write(json.dumps([function, arguments]) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            end.cancel()
        if not answer:
            self.errors.seek(0)
            pytest.fail(f"no answer within {seconds} s, or the process ended: {self.errors.read()[-4000:]}")
        answer = json.loads(answer)
        if isinstance(answer, dict) and "error" in answer:
            pytest.fail(answer["error"])
        return answer


@pytest.fixture(scope="module")
def eight_devices() -> Iterator[SimulatedDevices]:
    with tempfile.TemporaryFile("w+") as errors:
        devices = SimulatedDevices(errors)
        with devices.process:
            yield devices
            devices.process.stdin.close()
