"""See a batch: draw which rows are positives of which, which are negatives, and which play no part.

Four batches, drawn from `ntxent_jax.pair_masks`, which gives the pairs as the losses see them: rows with labels, two
views of the same items, a batch with padding and with the same thing twice, and a queue of earlier rows as candidates.

    python examples/see_a_batch.py --help
"""

import argparse
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

import ntxent_jax

NAMES = ["plays no part", "negative", "positive"]
COLOURS = ["#f4f3ef", "#9fb8cc", "#d1495b"]


def draw(axes: Axes, masks: ntxent_jax.PairMasks, anchors: list[str], candidates: list[str], title: str) -> None:
    """One square for each pair: anchors are rows, candidates columns."""
    pairs = np.where(masks.positive, 2, np.where(masks.negative, 1, 0))
    axes.imshow(pairs, cmap=ListedColormap(COLOURS), vmin=0, vmax=2, interpolation="nearest", aspect="equal")
    axes.set_xticks(range(len(candidates)), candidates, fontsize=9)
    axes.set_yticks(range(len(anchors)), anchors, fontsize=9)
    axes.set_xticks(np.arange(len(candidates) + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(anchors) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=2)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    axes.set(xlabel="candidate", ylabel="anchor")
    axes.set_title(title, loc="left", fontsize=11)


def draw_all() -> Figure:
    """The four batches."""
    figure = Figure(figsize=(10.5, 10.5), layout="constrained")
    (labelled, two_views), (padded, queued) = figure.subplots(2, 2)

    labels = jnp.array([0, 0, 0, 1, 1, 2, 3, 3])
    names = [f"label {label}" for label in labels]
    short = [str(label) for label in labels]
    title = "Labels: ntxent(embeddings, labels)\na row is not its own candidate; label 2 is alone"
    draw(labelled, ntxent_jax.pair_masks(labels), names, short, title)

    items = jnp.tile(jnp.arange(4), 2)
    views = [f"{view}{item}" for view in "ab" for item in range(4)]
    title = "Two views of four items: ntxent_views(a, b)\nitem i of view a belongs to item i of view b"
    draw(two_views, ntxent_jax.pair_masks(items), views, views, title)

    ids = jnp.array([7, 7, 1, 2, 3, 4, 5, 6])
    real = jnp.arange(8) < 6
    rows = [f"label {label}, id {i}" if r else "padding" for label, i, r in zip(labels, ids, real, strict=True)]
    columns = [str(label) if r else "-" for label, r in zip(labels, real, strict=True)]
    title = "The same batch with where= and ids=\npadding is absent; rows of id 7 are the same thing"
    draw(padded, ntxent_jax.pair_masks(labels, where=real, ids=ids), rows, columns, title)

    queue, filled = jnp.array([1, 0, 2, 2, 3, 0, -1, -1]), jnp.arange(8) < 6
    slots = [str(label) if f else "-" for label, f in zip(queue, filled, strict=True)]
    masks = ntxent_jax.pair_masks(labels, queue, candidate_where=filled)
    draw(queued, masks, names, slots, "A queue as candidates=\nno row is left out as itself; two slots are empty")

    legend = [Patch(facecolor=colour, label=name) for name, colour in zip(NAMES, COLOURS, strict=True)]
    figure.legend(handles=legend[::-1], loc="outside lower center", ncols=3, frameon=False, fontsize=11)
    return figure


def main() -> None:
    """Draw and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "outputs", help="folder of the picture")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    draw_all().savefig(out / "see_a_batch.png", dpi=100)
    print(f"wrote {out / 'see_a_batch.png'}")


if __name__ == "__main__":
    main()
