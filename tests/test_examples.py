"""Every example runs from the command line, with small settings, and writes what it promises."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
OPTIONS = {
    "multi_device.py": [
        *("--devices", "--steps", "--batch-size", "--gather", "--seed"),
        *("--distributed", "--coordinator", "--num-processes", "--process-id"),
    ],
    "see_a_batch.py": ["--out"],
    "simclr_digits.py": ["--steps", "--batch-size", "--temperature", "--seed", "--out"],
}


def start(script: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"MPLBACKEND": "Agg", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(script), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def run(script: Path, *arguments: str) -> str:
    return outputs_of([start(script, *arguments)])[0]


def outputs_of(processes: list[subprocess.Popen[str]]) -> list[str]:
    try:
        outputs = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    return [output for output, _ in outputs]


def test_there_are_examples() -> None:
    assert [script.name for script in EXAMPLES] == sorted(OPTIONS)


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.name)
def test_help_names_the_options(script: Path) -> None:
    text = run(script, "--help")
    assert [option for option in OPTIONS[script.name] if option not in text] == []


def assert_picture(path: Path) -> None:
    assert path.read_bytes().startswith(b"\x89PNG"), f"{path.name} is not a picture"
    assert path.stat().st_size > 5_000, f"{path.name} is nearly empty"


def test_see_a_batch(tmp_path: Path) -> None:
    run(ROOT / "examples/see_a_batch.py", "--out", str(tmp_path))
    assert_picture(tmp_path / "see_a_batch.png")


def test_simclr_digits_with_small_settings(tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    text = run(ROOT / "examples/simclr_digits.py", "--steps", "5", "--batch-size", "32", "--out", str(out))
    for row in ["raw pixels", "untrained", "trained"]:
        assert row in text.lower(), text
    pictures = sorted(out.glob("*.png"))
    assert pictures, "no picture was written"
    for picture in pictures:
        assert_picture(picture)


def assert_as_on_one_device(text: str, steps: int) -> None:
    """Loss and update of every step differ by rounding; a step takes less memory than on one device."""
    rows = re.findall(r"^ +\d+  +([\d.]+)  +([\d.]+)  +(\S+e\S+)  +(\S+e\S+)$", text, re.MULTILINE)
    assert len(rows) == steps, text
    for loss, alone, *apart in rows:
        assert abs(float(loss) - float(alone)) < 1e-4, text
        assert max(map(float, apart)) < 1e-4, text
    shared, whole = re.findall(r"([\d.]+) MB", text)
    assert float(shared) < float(whole), text


@pytest.mark.slow
def test_multi_device_with_small_settings() -> None:
    settings = ["--devices", "4", "--steps", "2", "--batch-size", "32", "--gather", "ring"]
    text = run(ROOT / "examples/multi_device.py", *settings)
    assert text.startswith('4 devices (cpu) in 1 process(es), 8 of 32 images on each, gather="ring"')
    assert_as_on_one_device(text, 2)


@pytest.mark.slow
def test_multi_device_in_two_processes() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    settings = ["--devices", "2", "--steps", "2", "--batch-size", "32", "--distributed", "--coordinator", coordinator]
    settings += ["--num-processes", "2", "--process-id"]
    first, second = outputs_of([start(ROOT / "examples/multi_device.py", *settings, number) for number in "01"])
    assert "4 devices (cpu) in 2 process(es), 8 of 32 images on each" in first
    assert_as_on_one_device(first, 2)
    assert "step" not in second


def test_multi_device_refuses_a_batch_that_cannot_be_split() -> None:
    process = start(ROOT / "examples/multi_device.py", "--devices", "3", "--batch-size", "32")
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 2
    assert "it must be a multiple of the number of devices, 3" in errors
