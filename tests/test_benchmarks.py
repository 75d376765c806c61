"""The benchmark runs, writes what it promises, and its rivals compute the same losses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RUNNER = Path(__file__).parent / "benchmarks/run.py"
PAGE = "before\n<!-- results: begin -->\nold\n<!-- results: end -->\nafter\n"


def run(*arguments: str) -> str:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(RUNNER), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("benchmark")
    page = folder / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    out = folder / "new" / "results"
    run("--quick", "--losses", "views,pairs,clip", "--temperature", "0.2", "--out", str(out), "--page", str(page))
    return out


@pytest.mark.slow
def test_every_rival_agrees(written: Path) -> None:
    rows = json.loads((written / "results.json").read_text(encoding="utf-8"))["rows"]
    found = [(row["loss"], row["rival"], row["agrees"], row["note"]) for row in rows]
    assert found == [
        ("views", "dense", True, ""),
        ("pairs", "dense", True, ""),
        ("pairs", "optax", True, ""),
        ("clip", "dense", True, ""),
    ]


def test_everything_is_measured(written: Path) -> None:
    results = json.loads((written / "results.json").read_text(encoding="utf-8"))
    for row in results["rows"]:
        assert len(row["ours_seconds"]) == len(row["rival_seconds"]) == 2
        for side in ("ours", "rival"):
            assert min(row[f"{side}_seconds"]) > 0
            assert row[f"{side}_compile_seconds"] > 0
            assert row[f"{side}_temporary_bytes"] > 0
    assert min(results["product_rates"]["16"].values()) > 0
    assert results["import_seconds"]["ntxent_jax"] > 0
    assert results["temperature"] == 0.2
    assert {"python", "jax", "jaxlib", "optax"} <= set(results["versions"])


def test_table_stands_between_the_markers(written: Path) -> None:
    page = (written.parents[1] / "page.md").read_text(encoding="utf-8")
    before, after = PAGE.split("old\n")
    assert page.startswith(before)
    assert page.endswith(after)
    assert "old" not in page
    assert page.count("| yes |") == 4
    assert "](new/results/time.png)" in page


@pytest.mark.parametrize("name", ["time.png", "memory.png"])
def test_plots(written: Path, name: str) -> None:
    assert (written / name).read_bytes().startswith(b"\x89PNG")
    assert 5_000 < (written / name).stat().st_size < 200_000


def test_help() -> None:
    text = run("--help")
    options = [
        "--sizes",
        "--dims",
        "--losses",
        "--rivals",
        "--dtype",
        "--temperature",
        "--repeats",
        "--out",
        "--page",
        "--quick",
    ]
    assert [option for option in options if option not in text] == []
