"""Two processes that hold a batch together find the loss and the gradient of one process that holds all of it."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from assertions import assert_close, assert_same_direction
from test_devices import GATHERS

SECONDS = 120


def a_free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run(number):
    """What each of some processes that belong together printed; four devices in all."""
    port, here = a_free_port(), Path(__file__).parent
    flags = f"--xla_force_host_platform_device_count={4 // number} {os.environ.get('XLA_FLAGS', '')}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [sys.executable, here / "on_processes.py", *map(str, (i, number, port)), *GATHERS],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(number)
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


@pytest.fixture(scope="module")
def found():
    return *run(2), *run(1)


def test_two_processes(found):
    first, second, alone = found
    assert len(alone) == 2 * 3 + (3 + 1) * len(GATHERS)
    for name, (value, gradient) in alone.items():
        right, slopes = alone[f"{name.split(',')[0]}, jit, Auto"]
        for one, its in ((value, gradient), first[name], second[name]):
            assert_close(one, right, rtol=1e-10, name=name)
            assert_close(its, slopes, rtol=1e-8, atol=1e-10 * np.abs(slopes).max(), name=name)
            assert_same_direction(its, slopes)
