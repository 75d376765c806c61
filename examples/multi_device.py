"""SimCLR on handwritten digits over many devices, and the proof that it is the training of one device.

The encoder, the images and their distortions are those of `simclr_digits.py`. Each device encodes its share of every
batch; `ntxent_views` inside `jax.shard_map` lets them choose among the images of all devices. The same steps are done
once more on one device alone, with the whole batch. Printed are both losses, how far losses and parameter updates lie
apart, and the memory that the compiled programs take on each device.

Eight devices are simulated where there is only a CPU. GPUs and TPUs are used as they are:

    python examples/multi_device.py
    python examples/multi_device.py --gather ring

On a cluster every process runs the same program. Where a scheduler says who takes part (Slurm, Open MPI, TPU pods),
JAX finds it out; otherwise say it:

    srun python examples/multi_device.py --distributed
    python examples/multi_device.py --distributed --coordinator 10.0.0.1:1234 --num-processes 2 --process-id 0

Each process feeds the rows of its own devices only. Two processes on one machine, to try it:

    options="--devices 4 --distributed --coordinator localhost:1234 --num-processes 2"
    for i in 0 1; do python examples/multi_device.py $options --process-id $i & done; wait
"""

import argparse
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from simclr_digits import TRAIN_IMAGES, Encoder, distort, load_data

import ntxent_jax

AXIS = "batch"
Tree = Any
ALONG_BATCH, EVERYWHERE = (PartitionSpec(*axes) for axes in ((AXIS,), ()))


# --- A training step -------------------------------------------------------------------------------------------------


class State(NamedTuple):
    """What a step takes, and returns for the next one."""

    parameters: Tree
    momentum: Tree


class Outcome(NamedTuple):
    """What is compared between many devices and one."""

    loss: jax.Array
    updates: Tree


Step = Callable[[State, jax.Array, jax.Array, jax.Array], tuple[State, Outcome]]


def make_step(graph: nnx.GraphDef[Encoder], optimizer: optax.GradientTransformation, seed: int, **across: Any) -> Step:
    """A training step for images `[n, 8, 8]`, their numbers `[n]`, and the number of the step.

    With `axis_name` it is what each device does, its own images in hand; without, the batch is whole.
    """

    def loss_of(parameters: Tree, images: jax.Array, numbers: jax.Array, step: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), step)
        # From the image's number, so that an image is distorted in the same way on whatever device it lies.
        keys = jax.vmap(lambda number: jax.random.split(jax.random.fold_in(key, number)))(numbers)
        encode = nnx.merge(graph, parameters)
        views = [encode(jax.vmap(distort)(images, keys[:, view])) for view in (0, 1)]
        return ntxent_jax.ntxent_views(*views, temperature=0.5, **across)

    def step(state: State, *batch: jax.Array) -> tuple[State, Outcome]:
        loss, gradient = jax.value_and_grad(loss_of)(state.parameters, *batch)
        if "axis_name" in across:
            gradient = jax.lax.pmean(gradient, across["axis_name"])
        updates, momentum = optimizer.update(gradient, state.momentum, state.parameters)
        return State(optax.apply_updates(state.parameters, updates), momentum), Outcome(loss, updates)

    return step


def over_devices(step: Step, mesh: Mesh) -> Step:
    """The step on all devices: images are split among them, the rest is the same everywhere."""
    return jax.shard_map(
        step, mesh=mesh, in_specs=(EVERYWHERE, ALONG_BATCH, ALONG_BATCH, EVERYWHERE), out_specs=EVERYWHERE
    )


def onto(mesh: Mesh, specification: PartitionSpec, tree: Tree) -> Tree:
    """Arrays that this process holds as parts of arrays that lie on all devices, those of other processes too."""
    sharding = NamedSharding(mesh, specification)
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x)), tree)


# --- Comparison ------------------------------------------------------------------------------------------------------


def compare(options: argparse.Namespace) -> None:
    """Train on all devices and on one, side by side."""
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,))
    number, share = jax.device_count(), options.batch_size // jax.process_count()
    say(
        f"{number} devices ({jax.devices()[0].platform}) in {jax.process_count()} process(es), "
        f'{options.batch_size // number} of {options.batch_size} images on each, gather="{options.gather}"'
    )
    graph, parameters = nnx.split(Encoder(nnx.Rngs(options.seed)))
    optimizer = optax.sgd(0.1, momentum=0.9)
    alone = State(parameters, optimizer.init(parameters))
    together = onto(mesh, EVERYWHERE, alone)
    whole_step = jax.jit(make_step(graph, optimizer, options.seed))
    shared_step = jax.jit(
        over_devices(make_step(graph, optimizer, options.seed, axis_name=AXIS, gather=options.gather), mesh)
    )
    images = load_data(options.seed).train
    random = np.random.default_rng(options.seed)  # All processes draw the same batch, and feed their rows of it.
    own = slice(jax.process_index() * share, (jax.process_index() + 1) * share)

    say(f"\n{'step':>4}  {'loss':>9}  {'one device':>10}  {'loss differs by':>15}  {'update differs by':>17}")
    for i in range(options.steps):
        chosen = random.choice(len(images), options.batch_size, replace=False).astype(np.int32)
        step = np.int32(i)
        own_rows = onto(mesh, ALONG_BATCH, (images[chosen[own]], chosen[own]))
        together, shared = shared_step(together, *own_rows, onto(mesh, EVERYWHERE, step))
        alone, whole = whole_step(alone, images[chosen], chosen, step)
        apart = relative_difference(shared.loss, whole.loss), relative_difference(shared.updates, whole.updates)
        say(f"{i + 1:4}  {shared.loss:9.6f}  {whole.loss:10.6f}  {apart[0]:15.1e}  {apart[1]:17.1e}")

    across = temporaries(shared_step, together, *own_rows, onto(mesh, EVERYWHERE, step))
    say(f"\nTemporary memory of a step: {across:.1f} MB on each device, instead of", end=" ")
    say(f"{temporaries(whole_step, alone, images[chosen], chosen, step):.1f} MB on one.")


def relative_difference(x: Tree, y: Tree) -> float:
    """Length of the difference of two vectors, however they are cut into arrays, over the length of the second."""
    a, b = (np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(z)]) for z in (x, y))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def temporaries(compiled: Any, *arguments: Tree) -> float:
    """What a jitted program takes on each device beside its arguments and results, in MB, as the compiler says."""
    return float(compiled.lower(*arguments).compile().memory_analysis().temp_size_in_bytes / 1e6)


def say(text: str, end: str = "\n") -> None:
    """Print once, however many processes there are."""
    if jax.process_index() == 0:
        print(text, end=end, flush=True)


# --- Command line ----------------------------------------------------------------------------------------------------


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the options and start JAX; an impossible value ends the program with a message."""
    parser = argparse.ArgumentParser(
        description="Train on 8x8 digits over many devices and compare with one device.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--devices", type=int, default=8, help="simulated devices of a process that has only a CPU")
    parser.add_argument("--steps", type=int, default=5, help="training steps, at least 1")
    parser.add_argument("--batch-size", type=int, default=256, help=f"images per step, at most {TRAIN_IMAGES}")
    parser.add_argument("--gather", choices=["all", "ring"], default="all", help="how devices see the others' rows")
    parser.add_argument("--seed", type=int, default=0, help="of everything random, 0 to 2147483647")
    several = parser.add_argument_group("several processes, each started with the same options")
    several.add_argument("--distributed", action="store_true", help="call jax.distributed.initialize()")
    several.add_argument("--coordinator", help="address:port of process 0, if JAX cannot find it out")
    several.add_argument("--num-processes", type=int, help="how many processes there are")
    several.add_argument("--process-id", type=int, help="which of them this is, from 0")
    options = parser.parse_args(arguments)
    if options.devices < 1:
        parser.error(f"--devices is {options.devices}; it must be at least 1")
    if options.steps < 1:
        parser.error(f"--steps is {options.steps}; it must be at least 1")
    if not 0 <= options.seed < 2**31:
        parser.error(f"--seed is {options.seed}; it must be 0 to 2147483647")
    # Before JAX looks for devices. It concerns the CPU only.
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", options.devices)
    if options.distributed:
        jax.distributed.initialize(options.coordinator, options.num_processes, options.process_id)
    number = jax.device_count()
    if not number <= options.batch_size <= TRAIN_IMAGES or options.batch_size % number:
        parser.error(
            f"--batch-size is {options.batch_size}; it must be a multiple of the number of devices, {number}, and at "
            f"most {TRAIN_IMAGES}, the training images"
        )
    return options


if __name__ == "__main__":
    compare(parse_options())
