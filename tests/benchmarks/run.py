"""Measure value and gradient of the losses against other systems, and write a table, two plots and the raw numbers.

    python tests/benchmarks/run.py --out docs/_static/benchmarks --page docs/benchmarks.md

Needs what `python -m pip install -e '.[examples]'` installs; torch and pytorch-metric-learning take part if installed.
What is measured and how: docs/benchmarks.md.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import cases
import jax
import measure
import report
from cases import DTYPES, LOSSES, Arrays, Loss, Rival, jax_rivals

# What PyTorch's threads are given to fall asleep, seconds.
REST_BESIDE_TORCH = 0.002
WIDTHS = [8, 6, 15, 17, 17, 24, 13, 12, 12, 5]


class Settings(NamedTuple):
    dtype: str
    repeats: int
    seconds: float


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.replace("_", "").split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=numbers, help="numbers of rows, even; default: 256,1024,4096,16384,65536")
    parser.add_argument("--dims", type=numbers, help="numbers of features; default: 128")
    parser.add_argument("--losses", default=",".join(LOSSES), help="default: %(default)s")
    parser.add_argument(
        "--rivals",
        help="of dense, optax, simclr, open_clip, metric_learning; '' for none; default: all that are installed",
    )
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32", help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=cases.TEMPERATURE, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, help="calls of each system; default: 21")
    parser.add_argument(
        "--seconds", type=float, default=30, help="stop a pair after this long, at 3 calls or more; default: 30"
    )
    parser.add_argument(
        "--dense-rows", type=int, default=16_384, help="largest n of the whole-matrix rivals; default: %(default)s"
    )
    parser.add_argument(
        "--metric-learning-rows",
        type=int,
        default=512,
        help="largest n of pytorch-metric-learning, of which 1024 takes about 18 GB; default: %(default)s",
    )
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"), help="folder; default: %(default)s")
    parser.add_argument("--page", type=Path, help="put the table between its markers; default: OUT/table.md")
    parser.add_argument(
        "--quick", action="store_true", help="only see that it works: 64 rows of 16, 2 calls, rivals in JAX"
    )
    options = parser.parse_args()
    usual: dict[str, Any] = {"sizes": [256, 1024, 4096, 16_384, 65_536], "dims": [128], "repeats": 21, "rivals": None}
    quick: dict[str, Any] = {"sizes": [64], "dims": [16], "repeats": 2, "rivals": "dense,optax"}
    for name, value in (quick if options.quick else usual).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.page = options.page or options.out / "table.md"
    if any(n % 2 or n < 4 for n in options.sizes) or options.repeats < 1:
        parser.error("sizes must be even and at least 4, repeats at least 1")
    if unknown := set(options.losses.split(",")) - set(LOSSES):
        parser.error(f"no such losses: {', '.join(sorted(unknown))}")
    return options


def rivals_of(options: argparse.Namespace, cores: int) -> dict[str, Rival]:
    """The rivals asked for, or, if none is named, all that are installed."""
    rivals = jax_rivals(options.dense_rows)
    wanted = None if options.rivals is None else set(filter(None, options.rivals.split(",")))
    if find_spec("torch") and (wanted is None or wanted - set(rivals)):
        import torch
        from torch_cases import torch_rivals

        torch.set_num_threads(cores)
        metric_learning_rows = options.metric_learning_rows if find_spec("pytorch_metric_learning") else 0
        rivals |= torch_rivals(options.dense_rows, metric_learning_rows)
    if wanted is None:
        return rivals
    if missing := wanted - set(rivals):
        raise SystemExit(f"not known or not installed: {', '.join(sorted(missing))}")
    return {name: rival for name, rival in rivals.items() if name in wanted}


def compare(
    ours: measure.System, rival: Rival | None, loss: Loss, name: str, arrays: Arrays, settings: Settings
) -> dict[str, Any]:
    """Check that ours and the rival agree, then time them in turn. A rival that fails becomes a note."""
    other, agreed, note, rest = None, None, "", 0.0
    if rival is not None:
        prepare = measure.torch_system if rival.framework == "torch" else measure.jax_system
        rest = REST_BESIDE_TORCH if rival.framework == "torch" else 0.0
        try:
            other = prepare(rival.formulas[name], arrays, loss.wrt)
            agreed = measure.agreement(ours.call, other.call, settings.dtype)
        except (MemoryError, RuntimeError, TypeError, ValueError) as error:
            other, note = None, f"failed: {type(error).__name__}"
            print(f"{rival.title}: {error}", file=sys.stderr)
    if other is None:
        ours.call()
    times = measure.alternate(ours.call, other.call if other else None, settings.repeats, settings.seconds, rest)
    return {
        "ours_seconds": times.ours,
        "rival_seconds": times.rival,
        "ours_temporary_bytes": ours.temporary_bytes,
        "rival_temporary_bytes": other.temporary_bytes if other else None,
        "ours_compile_seconds": ours.compile_seconds,
        "rival_compile_seconds": other.compile_seconds if other else None,
        "value_error": agreed.value_error if agreed else None,
        "gradient_error": agreed.gradient_error if agreed else None,
        "agrees": agreed.agrees if agreed else None,
        "note": note,
    }


def rows_of(
    name: str, n: int, d: int, rivals: dict[str, Rival], rate: float, settings: Settings
) -> Iterator[report.Row]:
    """A row for each rival that has this loss at this size, or one of ours alone."""
    loss = LOSSES[name]
    arrays = loss.inputs(n, d, DTYPES[settings.dtype])
    ours = measure.jax_system(loss.ours, arrays, loss.wrt)
    able: list[tuple[str | None, Rival | None]] = [
        (key, rival) for key, rival in rivals.items() if n <= rival.max_rows.get(name, 0)
    ]
    for key, rival in able or [(None, None)]:
        measured = compare(ours, rival, loss, name, arrays, settings)
        limit = measure.least_operations(loss, n, d) / rate
        yield report.Row(loss=name, n=n, d=d, rival=key, limit_seconds=limit, **measured)


def say(texts: list[str]) -> None:
    line = "  ".join(text.replace("*", "").rjust(width) for text, width in zip(texts, WIDTHS, strict=True))
    print(line, flush=True)


def main() -> None:
    options = arguments()
    jax.config.update("jax_enable_compilation_cache", False)
    cases.TEMPERATURE = options.temperature
    settings = Settings(options.dtype, options.repeats, options.seconds)
    machine = report.machine()
    rivals = rivals_of(options, machine["cores"])
    results: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine,
        "versions": report.versions(),
        "dtype": options.dtype,
        "temperature": options.temperature,
        "import_seconds": measure.import_seconds(1 if options.quick else 5),
        "product_rates": {},
    }
    rows: list[report.Row] = []
    say(report.HEADINGS)
    for d in options.dims:
        rates = measure.product_rates(min(max(options.sizes), 16_384), d, options.dtype, 0.01 if options.quick else 0.2)
        results["product_rates"][d] = rates
        print(f"d = {d}: matrix products at {max(rates.values()) / 1e9:.0f} GFLOP/s")
        for n in options.sizes:
            for name in options.losses.split(","):
                for row in rows_of(name, n, d, rivals, max(rates.values()), settings):
                    rows.append(row)
                    say(report.cells(row))
            # After every size, so that an interrupted run keeps what it has.
            report.write(results, rows, options.out, options.page)
    print(f"written: {options.out}, {options.page}")


if __name__ == "__main__":
    main()
