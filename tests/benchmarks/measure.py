"""How it is measured: compiled programs called in turn, their memory, and the rate of the machine's matrix products."""

import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from cases import Arrays, Formula, Loss

# Largest difference from ours of a rival that agrees: of the value, and of the gradient relative to its norm.
TOLERANCES = {"float32": (1e-4, 1e-3), "bfloat16": (2e-2, 6e-2)}
FEWEST_CALLS = 3

# A call runs to its end, and gives the value and the gradients.
Call = Callable[[], tuple[Any, tuple[Any, ...]]]


class System(NamedTuple):
    """A program that is ready to run. What cannot be known (PyTorch's memory, say) is None."""

    call: Call
    temporary_bytes: int | None
    compile_seconds: float | None


class Times(NamedTuple):
    """Seconds of the calls of two systems, in the order they were made, and how far apart two neighbours are."""

    ours: list[float]
    rival: list[float]


class Agreement(NamedTuple):
    value_error: float
    gradient_error: float
    agrees: bool


def jax_system(formula: Formula, arrays: Arrays, wrt: int) -> System:
    """Compile value and gradient with nothing left over from earlier compilations."""
    jax.clear_caches()
    step = jax.jit(jax.value_and_grad(formula, tuple(range(wrt))))
    inputs = [jax.device_put(array) for array in arrays]
    start = time.perf_counter()
    program = step.lower(*inputs).compile()
    seconds = time.perf_counter() - start
    memory = program.memory_analysis()
    return System(lambda: jax.block_until_ready(program(*inputs)), memory.temp_size_in_bytes, seconds)


def torch_system(formula: Formula, arrays: Arrays, wrt: int) -> System:
    import torch

    device = "cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu"

    def tensor(array: npt.NDArray[Any]) -> torch.Tensor:
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.astype(np.float32)).to(device, torch.bfloat16)
        return torch.from_numpy(array.copy()).to(device)

    inputs = [tensor(array) for array in arrays]
    rows = [x.requires_grad_() for x in inputs[:wrt]]

    def call() -> tuple[Any, tuple[Any, ...]]:
        value = formula(*inputs)
        gradients = torch.autograd.grad(value, rows)
        if device == "cuda":
            torch.cuda.synchronize()
        return value.detach(), gradients

    return System(call, None, None)


def alternate(ours: Call, rival: Call | None, repeats: int, seconds: float, rest: float) -> Times:
    """Ours, rival, ours, rival, ... until ``repeats`` calls of each, or, after the fewest, until ``seconds`` are over.

    Each follows a call of its own that is not timed, or it would pay for what the other left behind: memory that went
    back to the system, caches full of something else. ``rest`` seconds pass before both, for the threads of one
    framework to fall asleep before the other's work.
    """
    times = Times([], [])
    end = time.perf_counter() + seconds
    while len(times.ours) < repeats:
        if len(times.ours) >= FEWEST_CALLS and time.perf_counter() > end:
            break
        for call, list_of_times in [(ours, times.ours), (rival, times.rival)]:
            if call is not None:
                time.sleep(rest)
                call()
                start = time.perf_counter()
                call()
                list_of_times.append(time.perf_counter() - start)
    return times


def on_host(value: Any) -> npt.NDArray[np.float64]:
    if hasattr(value, "detach"):
        value = value.detach().float().cpu().numpy()
    return np.asarray(value).astype(np.float64)


def agreement(ours: Call, rival: Call, dtype: str) -> Agreement:
    """Compare value and gradients. These calls also warm both up."""
    (value, gradients), (other_value, other_gradients) = ours(), rival()
    gradient = np.concatenate([on_host(g) for g in gradients])
    difference = gradient - np.concatenate([on_host(g) for g in other_gradients])
    errors = (
        float(abs(on_host(value) - on_host(other_value)) / max(1.0, abs(float(on_host(value))))),
        float(np.linalg.norm(difference) / max(float(np.linalg.norm(gradient)), sys.float_info.min)),
    )
    # Written so that NaN does not agree.
    agrees = all(error <= limit for error, limit in zip(errors, TOLERANCES[dtype], strict=True))
    return Agreement(*errors, agrees)


def least_operations(loss: Loss, n: int, d: int) -> int:
    return loss.operations * n * n * d


# The machine ---------------------------------------------------------------------------------------------------------


def product_seconds(x_shape: tuple[int, int], y_shape: tuple[int, int], dtype: str, seconds: float) -> float:
    """Shortest time of one product out of many inside one program, so that neither dispatch nor memory counts."""
    x = jax.random.normal(jax.random.key(0), x_shape, dtype)
    y = jax.random.normal(jax.random.key(1), y_shape, dtype)
    precision = "highest" if dtype == "float32" else None

    @jax.jit
    def products(count: jax.Array) -> jax.Array:
        def body(_: jax.Array, last: jax.Array) -> jax.Array:
            # Depends on the last product, so that no product can be moved out of the loop.
            moved = x + (1e-30 * last[0, 0]).astype(dtype)
            return jnp.matmul(moved, y, precision=precision, preferred_element_type=jnp.float32)

        return jax.lax.fori_loop(0, count, body, jnp.zeros((x_shape[0], y_shape[1]), jnp.float32))

    def run(count: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(products(count))
        return time.perf_counter() - start

    run(1)
    count = 1
    while run(count) < seconds:
        count *= 2
    return min(run(count) for _ in range(5)) / count


def product_rates(n: int, d: int, dtype: str, seconds: float) -> dict[str, float]:
    """Operations a second of matrix products shaped like those of a loss and of its gradient."""
    wide = max(n // 2, 1)
    shapes = {
        ((256, d), (d, 4096)),
        ((256, 4096), (4096, d)),
        ((4096, 256), (256, d)),
        ((512, d), (d, wide)),
        ((512, wide), (wide, d)),
        ((4096, d), (d, 4096)),
        ((4096, 4096), (4096, d)),
    }
    return {
        f"{list(x)} x {list(y)}": 2 * math.prod(x) * y[1] / product_seconds(x, y, dtype, seconds)
        for x, y in sorted(shapes)
    }


def import_seconds(runs: int) -> dict[str, float]:
    """Median time of ``import jax``, and of ``import ntxent_jax`` after it, in fresh processes."""
    code = (
        "import time; a = time.perf_counter(); import jax, jax.numpy; b = time.perf_counter(); import ntxent_jax; "
        "print(b - a, time.perf_counter() - b)"
    )
    lines = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(runs)
    ]
    jax_seconds, ours = (statistics.median(float(line[k]) for line in lines) for k in (0, 1))
    return {"jax": jax_seconds, "ntxent_jax": ours}
