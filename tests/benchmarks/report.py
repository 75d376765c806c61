"""What is written: the raw results, a table in Markdown, and two plots."""

import json
import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from cases import LOSSES
from matplotlib.axes import Axes

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
PACKAGES = ["jax", "jaxlib", "ntxent-jax", "numpy", "optax", "torch", "pytorch-metric-learning"]
OURS = "ntxent_jax"
# Colours of Okabe and Ito, told apart with any colour vision; markers and dashes say the same without colour.
STYLES = {
    OURS: ("#0072B2", "o", "-"),
    "dense": ("#D55E00", "s", "--"),
    "optax": ("#009E73", "^", "-."),
    "simclr": ("#CC79A7", "D", ":"),
    "open_clip": ("#CC79A7", "D", ":"),
    "metric_learning": ("#E69F00", "v", (0, (5, 1, 1, 1, 1, 1))),
}


class Row(NamedTuple):
    """One pair of systems at one size. Times are in seconds; without a rival its entries are empty or None."""

    loss: str
    n: int
    d: int
    rival: str | None
    ours_seconds: list[float]
    rival_seconds: list[float]
    ours_temporary_bytes: int
    rival_temporary_bytes: int | None
    ours_compile_seconds: float
    rival_compile_seconds: float | None
    # Time that the arithmetic alone needs at the measured rate of matrix products.
    limit_seconds: float
    value_error: float | None
    gradient_error: float | None
    # None where there is no rival, or where it failed; `note` says why.
    agrees: bool | None
    note: str


def processor() -> str:
    names = re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text()) if os.name == "posix" else []
    return names[0] if names else platform.processor()


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    device = jax.devices()[0]
    return {
        "processor": processor(),
        "cores": cores,
        "device": device.platform if device.platform == "cpu" else f"{len(jax.devices())} x {device.device_kind}",
        "system": f"{platform.system()} {platform.release()}",
    }


# Table ---------------------------------------------------------------------------------------------------------------


def milliseconds(seconds: list[float]) -> str:
    if not seconds:
        return "-"
    return f"{number(1e3 * float(np.median(seconds)))} ({number(1e3 * min(seconds))})"


def number(value: float) -> str:
    """Three digits, and no exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def quartiles(row: Row) -> tuple[float, float]:
    """Spread of rival / ours over neighbouring calls."""
    low, high = np.quantile(np.divide(row.rival_seconds, row.ours_seconds), [0.25, 0.75])
    return float(low), float(high)


def ratio(row: Row) -> str:
    if not row.rival_seconds:
        return "-"
    low, high = quartiles(row)
    middle = float(np.median(row.rival_seconds) / np.median(row.ours_seconds))
    return f"**{number(middle)}** ({number(low)} to {number(high)})"


def either(ours: float | None, rival: float | None, unit: float) -> str:
    return " / ".join("-" if value is None else number(value / unit) for value in (ours, rival))


def verdict(row: Row) -> str:
    if row.rival is None:
        return "-"
    return row.note or ("yes" if row.agrees else f"NO ({row.value_error:.0e}, {row.gradient_error:.0e})")


HEADINGS = [
    "loss",
    "n",
    "rival",
    "ours, ms",
    "rival, ms",
    "rival / ours",
    "temporaries, MB",
    "compile, s",
    "x limit",
    "agree",
]


def cells(row: Row) -> list[str]:
    limits = [float(np.median(s)) / row.limit_seconds if s else None for s in (row.ours_seconds, row.rival_seconds)]
    return [
        row.loss,
        f"{row.n:,}",
        row.rival or "-",
        milliseconds(row.ours_seconds),
        milliseconds(row.rival_seconds),
        ratio(row),
        either(row.ours_temporary_bytes, row.rival_temporary_bytes, 1e6),
        either(row.ours_compile_seconds, row.rival_compile_seconds, 1),
        either(*limits, 1),
        verdict(row),
    ]


def line(texts: list[str]) -> str:
    return "| " + " | ".join(texts) + " |"


def table(rows: list[Row]) -> str:
    return "\n".join([line(HEADINGS), line(["---"] * len(HEADINGS)), *(line(cells(row)) for row in rows)])


def heading(results: dict[str, Any]) -> str:
    where, rates, imports = results["machine"], results["product_rates"], results["import_seconds"]
    kind = f"{where['processor']}, {where['cores']} cores, device `{where['device']}`, {where['system']}"
    lines = [
        f"* {kind}; {results['date']}; {results['dtype']}; temperature {results['temperature']}.",
        "* " + ", ".join(f"{name} {number_of}" for name, number_of in results["versions"].items()) + ".",
        f"* `{results['command']}`",
        "* Matrix products, best of their shapes: "
        + ", ".join(f"{max(of.values()) / 1e9:,.0f} GFLOP/s for d = {d}" for d, of in rates.items())
        + ".",
        f"* `import ntxent_jax` takes {imports['ntxent_jax']:.2f} s after the {imports['jax']:.2f} s of `import jax`.",
    ]
    return "\n".join(lines)


def fragment(results: dict[str, Any], rows: list[Row], pictures: str) -> str:
    """Markdown of everything; ``pictures`` is the folder of the plots, as seen from the page."""
    parts = [heading(results)]
    plotted = plotted_dim(rows)
    for name, text in [("time", "Time"), ("memory", "Peak temporaries")]:
        parts.append(f"![{text} against the number of rows, for {plotted} features]({pictures}/{name}.png)")
    for d in sorted({row.d for row in rows}):
        parts += [f"**{d} features, {results['dtype']}**", table([row for row in rows if row.d == d])]
    return "\n\n".join(parts) + "\n"


def write_page(page: Path, text: str) -> None:
    """Put the text between the markers of a page that exists, or else write a page of it alone."""
    if page.exists() and BEGIN in (old := page.read_text(encoding="utf-8")):
        before, rest = old.split(BEGIN, 1)
        text = f"{before}{BEGIN}\n{text}{END}{rest.split(END, 1)[1]}"
    page.write_text(text, encoding="utf-8")


# Plots ---------------------------------------------------------------------------------------------------------------


def plotted_dim(rows: list[Row]) -> int:
    """128 features if they were measured, or else the fewest."""
    dims = {row.d for row in rows}
    return 128 if 128 in dims else min(dims)


def curves(rows: list[Row], quantity: str) -> dict[str, dict[int, float]]:
    """For each system the time in ms (the best median of its pairs), or the temporaries in MB, at each size."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        for name, seconds, bytes_ in [
            (OURS, row.ours_seconds, row.ours_temporary_bytes),
            (row.rival, row.rival_seconds, row.rival_temporary_bytes),
        ]:
            value = bytes_ and bytes_ / 1e6
            if quantity == "time":
                value = 1e3 * float(np.median(seconds)) if seconds else None
            if name and value:
                points = found.setdefault(name, {})
                points[row.n] = min(value, points.get(row.n, value))
    return found


def draw(axes: Axes, rows: list[Row], loss: str, quantity: str) -> None:
    mine = [row for row in rows if row.loss == loss]
    for name, unordered in curves(mine, quantity).items():
        points = dict(sorted(unordered.items()))
        colour, marker, dashes = STYLES[name]
        axes.plot(list(points), list(points.values()), color=colour, marker=marker, ls=dashes, ms=5, lw=1.6, label=name)
    if quantity == "time":
        limits = dict(sorted((row.n, 1e3 * row.limit_seconds) for row in mine))
        axes.plot(list(limits), list(limits.values()), color="0.6", lw=1, label="arithmetic alone")
    axes.set(xscale="log", yscale="log", title=LOSSES[loss].title)
    axes.set_xscale("log", base=2)
    ticks = sorted({row.n for row in mine})
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
    axes.minorticks_off()
    axes.grid(color="0.9")


def plot(rows: list[Row], quantity: str, label: str, path: Path) -> None:
    """A panel for each loss, a line for each system."""
    rows = [row for row in rows if row.d == plotted_dim(rows)]
    losses = list(dict.fromkeys(row.loss for row in rows))
    columns = min(3, len(losses))
    lines = -(-len(losses) // columns)
    with plt.rc_context({"font.size": 8, "axes.titlesize": 8, "legend.fontsize": 7}):
        figure, panels = plt.subplots(
            lines, columns, figsize=(3.4 * columns, 2.7 * lines), squeeze=False, layout="constrained"
        )
        for axes in panels.flat[len(losses) :]:
            axes.remove()
        for axes, loss in zip(panels.flat, losses, strict=False):
            draw(axes, rows, loss, quantity)
            axes.legend(frameon=False)
        figure.supxlabel("n")
        figure.supylabel(label)
        figure.savefig(path, dpi=110)
        plt.close(figure)


def write(results: dict[str, Any], rows: list[Row], out: Path, page: Path) -> None:
    """Write results.json, time.png and memory.png into ``out``, and the table into ``page``."""
    for folder in (out, page.parent):
        folder.mkdir(parents=True, exist_ok=True)
    everything = results | {"rows": [row._asdict() for row in rows]}
    (out / "results.json").write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
    plot(rows, "time", "median time of value and gradient, ms", out / "time.png")
    plot(rows, "memory", "peak temporaries, MB", out / "memory.png")
    write_page(page, fragment(results, rows, Path(os.path.relpath(out, page.parent)).as_posix()))
