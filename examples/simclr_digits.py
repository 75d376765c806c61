"""SimCLR on handwritten digits: learn to see without labels, then recognise digits from ten examples of each.

The data are the 1,797 real 8x8 images that come with scikit-learn; nothing is downloaded.

1. One third of the images is set aside for the test. The encoder sees the others, never a label.
2. Every step draws a batch of images and distorts each one twice. `ntxent_views` asks the encoder which two of all the
   distorted images were the same one.
3. The encoder is frozen. Ten labels per class are drawn from the training images, a linear probe (logistic regression)
   and a nearest-neighbour classifier are fitted to their features and judged on the test images: 20 draws, mean and
   standard deviation. Raw pixels and an untrained encoder go through exactly the same.

The settings below were chosen on a third of the training images, held out for that (seeds 0 to 2); the penalty of the
linear probe is the one of five that suits raw pixels best. `--seed` changes all that is random: the split, the first
weights, the batches, the distortions and the draws of labels.

    python examples/simclr_digits.py --help
"""

import argparse
import math
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpy.typing as npt
import optax
from flax import nnx
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.manifold import TSNE
from sklearn.model_selection import train_test_split
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import normalize
from threadpoolctl import threadpool_limits
from tqdm import tqdm

import ntxent_jax

SIZE = 8  # Pixels along each side of an image.
TRAIN_IMAGES = 1198  # Two thirds of all 1,797.
LABELS_PER_CLASS = 10
DRAWS = 20
FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


# --- Data ------------------------------------------------------------------------------------------------------------


class Digits(NamedTuple):
    """Images `[n, 8, 8]` with values in [0, 1], and their labels `[n]`, which only the evaluation may read."""

    train: FloatArray
    test: FloatArray
    train_labels: IntArray
    test_labels: IntArray


def load_data(seed: int) -> Digits:
    """Two thirds to train on, one third to test on."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, SIZE, SIZE).astype(np.float32) / 16
    return Digits(*train_test_split(images, labels, train_size=TRAIN_IMAGES, stratify=labels, random_state=seed))


# --- Two views of an image -------------------------------------------------------------------------------------------


def distort(image: jax.Array, key: jax.Array) -> jax.Array:
    """Another way in which somebody might have written, or scanned, the same digit; `[8, 8]` to `[8, 8]`."""
    keys = jax.random.split(key, 8)

    def uniform(key: jax.Array, limit: float, shape: tuple[int, ...] = ()) -> jax.Array:
        return jax.random.uniform(key, shape, minval=-limit, maxval=limit)

    # Where each pixel of the view comes from: rotated, sheared, stretched and shifted about the centre, ...
    angle = uniform(keys[0], math.radians(15))
    rotate = jnp.array([[jnp.cos(angle), -jnp.sin(angle)], [jnp.sin(angle), jnp.cos(angle)]])
    shear = jnp.array([[1.0, uniform(keys[1], 0.2)], [0.0, 1.0]])
    stretch = jnp.exp(uniform(keys[2], 0.15, (2, 1)))
    pixels = jnp.arange(SIZE, dtype=jnp.float32)
    centre = (SIZE - 1) / 2
    grid = jnp.stack(jnp.meshgrid(pixels, pixels, indexing="ij")).reshape(2, -1) - centre
    source = rotate @ shear @ (stretch * grid) + centre + uniform(keys[3], 1.0, (2, 1))
    # ... and bent a little, by random moves of a coarse 3x3 mesh.
    bend = jax.image.resize(0.5 * jax.random.normal(keys[4], (2, 3, 3)), (2, SIZE, SIZE), "linear")
    rows, columns = source + bend.reshape(2, -1)
    view = jax.scipy.ndimage.map_coordinates(image, [rows, columns], order=1).reshape(SIZE, SIZE)  # bilinear

    # More or less ink, some noise, and a patch of 2x2 pixels (less at the edge) cut out.
    view = view * (1 + uniform(keys[5], 0.4)) + 0.1 * jax.random.normal(keys[6], view.shape)
    top, left = jax.random.randint(keys[7], (2,), -1, SIZE)
    cut_rows = (pixels >= top) & (pixels < top + 2)
    cut_columns = (pixels >= left) & (pixels < left + 2)
    return jnp.where(cut_rows[:, None] & cut_columns, 0.0, view)


def two_views(images: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Distort every image twice, each time differently."""
    keys = jax.random.split(key, (2, len(images)))
    return jax.vmap(distort)(images, keys[0]), jax.vmap(distort)(images, keys[1])


# --- Model -----------------------------------------------------------------------------------------------------------


class Encoder(nnx.Module):
    """A small convolutional network. Its features are kept; the projection head serves the loss and is thrown away."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        """Draw the first weights from `rngs`."""
        self.conv1 = nnx.Conv(1, 32, (3, 3), rngs=rngs)
        self.norm1 = nnx.LayerNorm(32, rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, (3, 3), strides=2, rngs=rngs)
        self.norm2 = nnx.LayerNorm(64, rngs=rngs)
        self.dense = nnx.Linear(64 * (SIZE // 2) ** 2, 256, rngs=rngs)
        self.norm3 = nnx.LayerNorm(256, rngs=rngs)
        self.head1 = nnx.Linear(256, 256, rngs=rngs)
        self.norm4 = nnx.LayerNorm(256, rngs=rngs)
        self.head2 = nnx.Linear(256, 64, rngs=rngs)

    def features(self, images: jax.Array) -> jax.Array:
        """Images `[n, 8, 8]` to features `[n, 256]`."""
        x = nnx.relu(self.norm1(self.conv1(images[..., None])))
        x = nnx.relu(self.norm2(self.conv2(x))).reshape(len(x), -1)
        return nnx.relu(self.norm3(self.dense(x)))

    def __call__(self, images: jax.Array) -> jax.Array:
        """Images `[n, 8, 8]` to embeddings `[n, 64]` for the loss."""
        x = nnx.relu(self.norm4(self.head1(self.features(images))))
        return self.head2(x)


# --- Training --------------------------------------------------------------------------------------------------------


@nnx.jit
def train_step(
    model: Encoder, optimizer: nnx.Optimizer[Encoder], images: jax.Array, key: jax.Array, temperature: float
) -> jax.Array:
    """Update model and optimizer with one batch of images; the loss."""
    view_a, view_b = two_views(images, key)

    def loss(model: Encoder) -> jax.Array:
        return ntxent_jax.ntxent_views(model(view_a), model(view_b), temperature=temperature)

    value: jax.Array
    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def train(model: Encoder, images: FloatArray, options: argparse.Namespace) -> list[float]:
    """Train the model in place; the loss of every step."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-3, options.steps // 10 + 1, options.steps + 2)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule, weight_decay=1e-4), wrt=nnx.Param)
    key = jax.random.key(options.seed)
    random = np.random.default_rng(options.seed)
    losses: list[float] = []
    with tqdm(range(options.steps), desc="training", unit="step") as progress:
        for step in progress:
            batch = images[random.choice(len(images), options.batch_size, replace=False)]
            loss = train_step(model, optimizer, jnp.asarray(batch), jax.random.fold_in(key, step), options.temperature)
            losses.append(float(loss))
            if not math.isfinite(losses[-1]):
                raise SystemExit(f"The loss is {losses[-1]} in step {step + 1}: try a higher temperature.")
            progress.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    return losses


# --- Evaluation ------------------------------------------------------------------------------------------------------


class Score(NamedTuple):
    """Accuracies in per cent, one per draw of labels, shape `[DRAWS]`."""

    linear_probe: npt.NDArray[np.float64]
    nearest_neighbour: npt.NDArray[np.float64]


def few_shot_scores(features: tuple[FloatArray, FloatArray], digits: Digits, seed: int) -> Score:
    """Test accuracy with a few labels per class; the same draws of labels for every kind of feature.

    Rows are scaled to unit length. Of the penalties `C` = 0.01, 0.1, ... 100, the last suits raw pixels best.
    """
    train, test = normalize(features[0]), normalize(features[1])
    classes = [np.flatnonzero(digits.train_labels == digit) for digit in range(10)]
    random = np.random.default_rng(seed)
    accuracies = []
    for _ in range(DRAWS):
        rows = np.concatenate([random.choice(members, LABELS_PER_CLASS, replace=False) for members in classes])
        fitted = [
            classifier.fit(train[rows], digits.train_labels[rows])
            for classifier in (LogisticRegression(C=100.0, max_iter=2000), KNeighborsClassifier(n_neighbors=1))
        ]
        accuracies.append([100 * classifier.score(test, digits.test_labels) for classifier in fitted])
    return Score(*np.array(accuracies).T)


features_of = nnx.jit(Encoder.features)


def encode(model: Encoder, digits: Digits) -> tuple[FloatArray, FloatArray]:
    """Features of the training and of the test images."""
    features = features_of(model, jnp.concatenate([digits.train, digits.test]))
    train, test = np.split(np.asarray(features), [len(digits.train)])
    return train, test


def table(scores: dict[str, Score]) -> str:
    """One line per kind of feature: mean and standard deviation over the draws."""
    lines = [f"{'':18}  {'linear probe':>14}  {'nearest neighbour':>17}"]
    for name, score in scores.items():
        cells = [f"{accuracy.mean():5.1f} ± {accuracy.std():3.1f} %" for accuracy in score]
        lines.append(f"{name:18}  {cells[0]:>14}  {cells[1]:>17}")
    return "\n".join(lines)


# --- Pictures --------------------------------------------------------------------------------------------------------

# Ten colours that colour-blind readers can tell apart (Paul Tol's "muted", and black), in the order of the digits.
COLOURS = ("#332288", "#cc6677", "#117733", "#d9a520", "#6bb6e0", "#882255", "#44aa99", "#8a8a22", "#aa4499", "#000000")
SHOWN = 20  # Images of each digit in the similarity matrix.


class Stage(NamedTuple):
    """The test images before or after training, as the pictures show them."""

    name: str
    points: FloatArray  # All of them on a 2-D map, `[n, 2]`.
    similarities: FloatArray  # Cosines among some of each digit, sorted by digit, `[10 * SHOWN, 10 * SHOWN]`.


def make_stage(name: str, features: FloatArray, labels: IntArray, seed: int) -> Stage:
    """Map features `[n, d]` to the plane with t-SNE (which sees no labels) and compare some of them."""
    points = TSNE(init="pca", max_iter=500, random_state=seed).fit_transform(normalize(features))
    rows = features[np.concatenate([np.flatnonzero(labels == digit)[:SHOWN] for digit in range(10)])]
    return Stage(name, points, np.asarray(ntxent_jax.cosine_similarity(rows, rows)))


def draw_views(axes: Axes, images: FloatArray, seed: int) -> None:
    """Some images (top) and two views of each (below)."""
    views = two_views(jnp.asarray(images), jax.random.key(seed))
    tiles = np.stack([images, *views])  # [3, n, 8, 8]
    framed = np.pad(tiles, [(0, 0), (0, 0), (1, 1), (1, 1)], constant_values=np.nan)
    sheet = framed.transpose(0, 2, 1, 3).reshape(3 * (SIZE + 2), -1)
    axes.imshow(sheet, cmap="gray_r", vmin=0.0, vmax=1.0, interpolation="nearest")
    axes.set_title("What it sees: images, and two random views of each. Which two views belong together?")
    axes.set_xticks([])
    axes.set_yticks((np.arange(3) + 0.5) * (SIZE + 2), ["image", "view a", "view b"])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def draw_loss(axes: Axes, losses: list[float], items: int, temperature: float) -> None:
    """The loss between chance and the least that any encoder could reach with `items` images in a batch."""
    chance = math.log(2 * items - 1)
    floor = float(ntxent_jax.loss_floor(2 * (items - 1), temperature, lowest_similarity=-1 / (items - 1)))
    axes.plot(np.arange(1, len(losses) + 1), losses, color=COLOURS[0], linewidth=1.5)
    place = axes.get_yaxis_transform()  # x as a share of the width, y in nats
    for level, name, colour, side, gap in [
        (chance, "chance, log(2N - 1)", COLOURS[5], "bottom", 4),
        (floor, "least possible, loss_floor", COLOURS[2], "top", -4),
    ]:
        axes.axhline(level, color=colour, linestyle="--")
        text = f"{name} = {level:.2f}"
        axes.annotate(text, (0.98, level), (0, gap), place, "offset points", color=colour, ha="right", va=side)
    axes.set(title="Loss on each batch", xlabel="step", ylabel="NT-Xent (nats)")
    axes.margins(y=0.15)


def draw_scores(axes: Axes, scores: dict[str, Score]) -> None:
    """Mean and standard deviation of both accuracies, one line per kind of feature."""
    for row, score in enumerate(scores.values()):
        for accuracy, marker, colour, shift in zip(score, "os", (COLOURS[0], COLOURS[3]), (-0.16, 0.16), strict=True):
            mean = float(accuracy.mean())
            axes.errorbar(mean, row + shift, xerr=accuracy.std(), fmt=marker, color=colour, markersize=9, capsize=4)
            axes.annotate(f"{mean:.1f}", (mean, row + shift), (0, 8), textcoords="offset points", ha="center")
    axes.set(title=f"Test accuracy, {LABELS_PER_CLASS} labels per class", xlabel="per cent (mean, standard deviation)")
    axes.set_yticks(range(len(scores)), [name.replace(" ", "\n") for name in scores])
    axes.set_ylim(len(scores), -0.5)  # Room for the legend below the last line.
    axes.legend(["linear probe", "nearest neighbour"], loc="lower center", ncols=2, fontsize=12)


def draw_map(axes: Axes, stage: Stage, labels: IntArray) -> None:
    """Every test image as a little numeral in the colour of its digit."""
    for digit, colour in enumerate(COLOURS):
        points = stage.points[labels == digit]
        axes.scatter(points[:, 0], points[:, 1], s=50, marker=f"${digit}$", color=colour, linewidth=0.3)
    axes.set(title=f"{stage.name}: map of the test images", xlabel="t-SNE 1", ylabel="t-SNE 2", xticks=[], yticks=[])


def draw_similarities(axes: Axes, stage: Stage) -> None:
    """Test images against each other, sorted by digit."""
    colours = matplotlib.colormaps["magma"].resampled(20)
    image = axes.imshow(stage.similarities, cmap=colours, vmin=0.0, vmax=1.0, interpolation="nearest")
    middles = SHOWN * (np.arange(10) + 0.5) - 0.5
    axes.set(title=f"{stage.name}: test images against each other", ylabel="digit")
    axes.set_xticks(middles, list("0123456789"))
    axes.set_yticks(middles, list("0123456789"))
    axes.tick_params(length=0)
    axes.figure.colorbar(image, ax=axes, location="bottom", aspect=50, pad=0.02, label="cosine similarity")


def draw_all(
    digits: Digits, losses: list[float], scores: dict[str, Score], stages: list[Stage], options: argparse.Namespace
) -> list[Path]:
    """Draw loss, maps and similarities, each in a file of its own, and everything in one; the files."""
    pictures = {
        "loss": Figure(figsize=(9, 6), layout="constrained"),
        "map": Figure(figsize=(15, 7.5), layout="constrained"),
        "similarity": Figure(figsize=(15, 8.5), layout="constrained"),
        "simclr_digits": Figure(figsize=(16, 13.2), layout="constrained"),
    }
    with matplotlib.rc_context({"font.size": 14, "axes.titlesize": 15}):
        pictures["simclr_digits"].suptitle("Digits told apart without labels: SimCLR with ntxent_jax", fontsize=20)
        panels = pictures["simclr_digits"].subplot_mosaic("vvv;abl;cds", height_ratios=[0.42, 1, 1])
        draw_views(panels["v"], digits.train[:24], options.seed)
        draw_scores(panels["s"], scores)
        for axes in (panels["l"], pictures["loss"].subplots()):
            draw_loss(axes, losses, options.batch_size, options.temperature)
        for column, stage in enumerate(stages):
            for axes in (panels["ab"[column]], pictures["map"].add_subplot(1, 2, column + 1)):
                draw_map(axes, stage, digits.test_labels)
            for axes in (panels["cd"[column]], pictures["similarity"].add_subplot(1, 2, column + 1)):
                draw_similarities(axes, stage)
        files = [options.out / f"{name}.png" for name in pictures]
        for file, figure in zip(files, pictures.values(), strict=True):
            figure.savefig(file, dpi=100)
            with Image.open(file) as picture:  # A palette of 256 colours makes the file three times smaller.
                picture.convert("RGB").quantize(256).save(file, optimize=True)
    return files


# --- Command line ----------------------------------------------------------------------------------------------------


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the options; an impossible value ends the program with a message."""
    parser = argparse.ArgumentParser(
        description="Train an encoder on 8x8 digits without labels (SimCLR) and compare it with raw pixels.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=1000, help="training steps, at least 1")
    parser.add_argument("--batch-size", type=int, default=256, help=f"images per step, 2 to {TRAIN_IMAGES}")
    parser.add_argument("--temperature", type=float, default=0.5, help="of the NT-Xent loss, above 0")
    parser.add_argument("--seed", type=int, default=0, help="of everything random, 0 to 2147483647")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "outputs", help="folder for the pictures")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps is {options.steps}; it must be at least 1")
    if not 2 <= options.batch_size <= TRAIN_IMAGES:
        parser.error(f"--batch-size is {options.batch_size}; it must be 2 to {TRAIN_IMAGES}, the training images")
    if not 0 < options.temperature < math.inf:
        parser.error(f"--temperature is {options.temperature}; it must be a finite number above 0, such as 0.5")
    if not 0 <= options.seed < 2**31:
        parser.error(f"--seed is {options.seed}; it must be 0 to 2147483647")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {options.out} cannot be made a folder: {error.strerror}")
    return options


def main() -> None:
    """Train, evaluate and draw."""
    options = parse_options()
    start = time.perf_counter()
    digits = load_data(options.seed)
    print(f"{len(digits.train)} images to train on (no labels), {len(digits.test)} to test on, seed {options.seed}")
    print(f"{options.steps} steps, batches of {options.batch_size} images, temperature {options.temperature}")

    model = Encoder(nnx.Rngs(options.seed))
    untrained = encode(model, digits)
    losses = train(model, digits.train, options)
    trained = encode(model, digits)

    pixels = digits.train.reshape(len(digits.train), -1), digits.test.reshape(len(digits.test), -1)
    kinds = {"raw pixels": pixels, "untrained encoder": untrained, "trained encoder": trained}
    with threadpool_limits(1):  # Such small problems are up to 30 times slower when threads share them.
        scores = {name: few_shot_scores(features, digits, options.seed) for name, features in kinds.items()}
        stages = [
            make_stage("Untrained", untrained[1], digits.test_labels, options.seed),
            make_stage("Trained", trained[1], digits.test_labels, options.seed),
        ]
    print(f"\nTest accuracy with {LABELS_PER_CLASS} labels per class, mean ± standard deviation of {DRAWS} draws:")
    print(table(scores))

    files = draw_all(digits, losses, scores, stages, options)
    print(f"\nPictures in {options.out}: {', '.join(file.name for file in files)}")
    print(f"{time.perf_counter() - start:.0f} seconds in all")


if __name__ == "__main__":
    main()
