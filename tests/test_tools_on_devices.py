"""Queue, gradient cache and search in steps of many devices are those of one device."""

import json
import subprocess
import sys

import pytest
import tools_on_devices
from tools_on_devices import CHECKS


@pytest.fixture(scope="module")
def failures():
    """What went wrong in each check, all of them in one process with eight devices."""
    command = [sys.executable, tools_on_devices.__file__, *CHECKS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", CHECKS)
def test_as_on_one_device(failures, name):
    assert failures[name] is None, failures[name]
