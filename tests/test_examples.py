"""Every example runs from the command line, with small settings, and writes what it promises."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
OPTIONS = {
    "see_a_batch.py": ["--out"],
    "simclr_digits.py": ["--steps", "--batch-size", "--temperature", "--seed", "--out"],
}


def run(script: Path, *arguments: str) -> str:
    environment = os.environ | {"MPLBACKEND": "Agg", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


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
