"""One batch on many devices: where a row stands among all, what is gathered, and what is summed.

Inside ``jax.shard_map``, ``jax.pmap`` or ``jax.vmap(axis_name=)`` a loss sees the rows of one device. With an axis name
its candidates are those of all devices, gathered with gradient, and its sums run over all devices. Everything between
these two is the same on one device: some anchors, and more candidates.

Outside of them arrays are whole, however they are laid out, and the compiler splits the work. If their types carry an
explicit mesh it is handed over to the compiler for the time of a call.
"""

import functools
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from ntxent_jax import checks

AxisName = str | Sequence[str]
Gather = Literal["all", "ring"]
Tree = TypeVar("Tree")
Result = TypeVar("Result")
P = ParamSpec("P")

_sum_over: Callable[..., Any] = lax.psum
_specification: Callable[..., PartitionSpec] = PartitionSpec


class Devices(NamedTuple):
    """The devices that hold one batch together.

    Attributes:
        axis: Name of the mapped axis along which they lie, or names of several. None: the batch is on this device.
        ring: Whether candidates pass by, one device's at a time, instead of being gathered.
    """

    axis: str | tuple[str, ...] | None = None
    ring: bool = False

    @property
    def number(self) -> int:
        """How many they are."""
        return 1 if self.axis is None else int(_sum_over(1, self.axis))

    @property
    def shares(self) -> int:
        """Of how many devices a gathered array holds rows."""
        return 1 if self.ring else self.number

    def positions(self, n: int) -> jax.Array:
        """Numbers ``[n]`` of this device's rows among the rows of all, those of one device following each other."""
        first = 0 if self.axis is None else n * lax.axis_index(self.axis)
        return jnp.arange(n) + first

    def gathered(self, tree: Tree) -> Tree:
        """Rows of all devices, in the order of their positions."""
        if self.shares == 1:
            return tree
        result: Tree = jax.tree.map(lambda x: lax.all_gather(x, self.axis, tiled=True), self._everywhere(tree))
        return result

    def summed(self, tree: Tree) -> Tree:
        """Sums over all devices, each for itself: JAX 0.7 cannot differentiate several at once if some are constant."""
        if self.axis is None:
            return tree
        result: Tree = jax.tree.map(lambda x: _sum_over(x, self.axis), self._everywhere(tree))
        return result

    def _everywhere(self, tree: Tree) -> Tree:
        return alike((tree, lax.axis_index(self.axis)))[0]


ALONE = Devices()


def devices_along(axis_name: AxisName | None, gather: Gather = "all") -> Devices:
    """The devices along an axis that surrounds the call."""
    checks.choice("gather", gather, ("all", "ring"))
    if axis_name is None:
        if gather != "all":
            raise ValueError(f"gather={gather!r} given without axis_name; on one device there is nothing to gather")
        return ALONE
    axis = axis_name if isinstance(axis_name, str) else tuple(axis_name)
    try:
        lax.axis_index(axis)
    except NameError:
        raise ValueError(
            f"axis_name={axis_name!r} is not an axis here; call the loss inside jax.shard_map, or leave axis_name out "
            "under plain jax.jit, where the batch is whole"
        ) from None
    return Devices(axis, gather == "ring")


def alike(tree: Tree) -> Tree:
    """All arrays of a tree in the type of those that differ from device to device.

    ``jax.shard_map`` with ``check_vma`` tells them apart from arrays that are the same everywhere, and asks loops and
    derivative rules not to mix the two.
    """
    mark = sum(jnp.zeros_like(x, shape=(), dtype=jnp.int8) for x in jax.tree.leaves(tree))

    def marked(x: jax.Array) -> jax.Array:
        return x ^ (mark != 0) if x.dtype == jnp.bool_ else x + jnp.asarray(mark, x.dtype)

    result: Tree = jax.tree.map(marked, tree)
    return result


def on_any_mesh(f: Callable[P, Result]) -> Callable[P, Result]:
    """``f`` also for arrays whose types say how an explicit mesh splits them: meanwhile the compiler decides."""

    @functools.wraps(f)
    def run(*args: P.args, **kwargs: P.kwargs) -> Result:
        leaves, structure = jax.tree.flatten((args, kwargs))
        given = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]
        shardings = [jax.typeof(leaves[i]).sharding for i in given]
        explicit = [x for x in shardings if AxisType.Explicit in x.mesh.axis_types]
        if not explicit:
            return f(*args, **kwargs)
        mesh = explicit[0].mesh
        axes = tuple(compress(mesh.axis_names, (kind == AxisType.Explicit for kind in mesh.axis_types)))

        def whole(*arrays: jax.Array) -> Result:
            known = dict(zip(given, arrays, strict=True))
            positional, named = jax.tree.unflatten(structure, [known.get(i, x) for i, x in enumerate(leaves)])
            return f(*positional, **named)

        rows = next((x.spec[:1] for x in explicit if x.spec), ())
        spec = _specification(*(rows if kwargs.get("reduction") == "none" else ()))
        automatic = jax.jit(jax.sharding.auto_axes(whole, axes=axes, out_sharding=spec))
        with jax.sharding.use_abstract_mesh(mesh):
            result: Result = automatic(*(leaves[i] for i in given))
        return result

    return run
