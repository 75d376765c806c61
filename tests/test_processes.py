"""Two processes that hold a batch together find the loss and the gradient of one process that holds all of it."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from assertions import assert_close, assert_same_direction
from on_processes import DATA, LOSSES, ROWS, WEIGHTS, plain
from test_devices import GATHERS

SECONDS = 120


def a_free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def found():
    """What each of two processes that belong together printed; each has two devices."""
    port, here = a_free_port(), Path(__file__).parent
    flags = f"--xla_force_host_platform_device_count=2 {os.environ.get('XLA_FLAGS', '')}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [sys.executable, here / "on_processes.py", *map(str, (i, 2, port)), *GATHERS],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-4000:]
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]  # Before it, the network may say something.


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", LOSSES)
def test_two_processes(name, found):
    """With this process, which has one device and the whole batch."""
    arrays = (WEIGHTS, *ROWS.values(), *DATA.values())
    right, slopes = jax.device_get(jax.jit(plain(LOSSES[name]))(*arrays))
    first, second = ({way: x for way, x in one.items() if way.startswith(f"{name},")} for one in found)
    assert first.keys() == second.keys()
    assert len(first) == len(GATHERS) + 1 + (name == "ntxent")
    for way in first:
        for value, gradient in (first[way], second[way]):
            assert_close(value, right, rtol=1e-10, name=way)
            assert_close(gradient, slopes, rtol=1e-8, atol=1e-10 * np.abs(slopes).max(), name=way)
            assert_same_direction(gradient, slopes)
