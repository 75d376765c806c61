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
from jax.typing import ArrayLike

from ntxent_jax import checks

AxisName = str | Sequence[str]
Gather = Literal["all", "ring"]
Tree = TypeVar("Tree")
Result = TypeVar("Result")
P = ParamSpec("P")


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
        return 1 if self.axis is None else int(lax.psum(1, self.axis))

    def first(self, n: int) -> jax.Array | int:
        """Number of this device's first row among the rows of all, if each has ``n``, one device's behind another's."""
        return 0 if self.axis is None else n * lax.axis_index(self.axis)

    def positions(self, n: int) -> jax.Array:
        """Numbers ``[n]`` of this device's rows among the rows of all."""
        return jnp.arange(n) + self.first(n)

    def gathered(self, tree: Tree) -> Tree:
        """Rows of all devices, in the order of their positions; the own ones in a ring."""
        if self.axis is None or self.ring:
            return tree

        def gather(x: jax.Array) -> jax.Array:
            return lax.all_gather(x, self.axis, tiled=True) if x.shape[0] else x  # XLA refuses to gather nothing.

        result: Tree = jax.tree.map(gather, self._everywhere(tree))
        return result

    def summed(self, tree: Tree) -> Tree:
        """Sums over all devices."""
        if self.axis is None:
            return tree
        # One by one: JAX 0.7 cannot transpose a sum of several of which only some have a derivative.
        result: Tree = jax.tree.map(lambda x: lax.psum(x, self.axis), self._everywhere(tree))
        return result

    def largest(self, tree: Tree) -> Tree:
        """The largest number of those that are not gathered, a constant for differentiation."""
        if not self.ring:
            return tree
        local = self._everywhere(lax.stop_gradient(tree))
        result: Tree = jax.tree.map(lambda x: lax.pmax(x, self.axis), local)
        return self._everywhere(result)

    def passed_on(self, tree: Tree, steps: int = 1) -> Tree:
        """What a device holds goes to the one that stands ``steps`` further in a circle of all."""
        pairs = [(i, (i + steps) % self.number) for i in range(self.number)]
        result: Tree = jax.tree.map(lambda x: lax.ppermute(x, self.axis, pairs), tree)
        return result

    def _everywhere(self, tree: Tree) -> Tree:
        return alike((tree, lax.axis_index(self.axis)))[0]


ALONE = Devices()


def devices_along(axis_name: AxisName | None, gather: Gather = "all") -> Devices:
    """The devices along an axis that surrounds the call."""
    checks.choice("gather", gather, ("all", "ring"))
    if axis_name is None:
        if gather != "all":
            raise ValueError(
                f"gather={gather!r} given without axis_name; pass axis_name inside jax.shard_map, or leave gather out"
            )
        return ALONE
    if not isinstance(axis_name, Sequence):
        raise TypeError(f"axis_name must be the name of an axis, or several names, got {axis_name!r}")
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
    if is_alike(tree):
        return tree
    mark = sum(_marks(tree))

    def marked(x: jax.Array) -> jax.Array:
        return x ^ (mark != 0) if x.dtype == jnp.bool_ else x + jnp.asarray(mark, x.dtype)

    result: Tree = jax.tree.map(marked, tree)
    return result


def is_alike(tree: Any) -> bool:
    """Whether all arrays of a tree are of one type in this regard."""
    return len({jax.typeof(mark) for mark in _marks(tree)}) <= 1


def _marks(tree: Any) -> list[jax.Array]:
    """Zeros that differ from device to device, as far as their types go, if the arrays of a tree do."""
    return [jnp.zeros_like(x, shape=(), dtype=jnp.int8) for x in jax.tree.leaves(tree)]


def split_of(x: ArrayLike, axes: int | None = None) -> PartitionSpec:
    """How an explicit mesh splits an array, or its first axes."""
    return PartitionSpec(*jax.typeof(x).sharding.spec[:axes])


def on_any_mesh(f: Callable[P, Result]) -> Callable[P, Result]:
    """``on_any_mesh_as`` for a function that returns a number, or rows with ``reduction="none"``."""
    return on_any_mesh_as(_number_or_rows)(f)


def on_any_mesh_as(layout: Callable[..., Any]) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
    """Makes a function take arrays whose types say how an explicit mesh splits them: meanwhile the compiler decides.

    Args:
        layout: From the arguments of the function to the specification of its result.
    """

    def decorated(f: Callable[P, Result]) -> Callable[P, Result]:
        @functools.wraps(f)
        def run(*args: P.args, **kwargs: P.kwargs) -> Result:
            leaves, structure = jax.tree.flatten((args, kwargs))
            given = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]
            mesh = next((mesh for i in given if (mesh := _explicit(leaves[i])) is not None), None)
            if mesh is None:
                return f(*args, **kwargs)
            axes = tuple(compress(mesh.axis_names, (kind == AxisType.Explicit for kind in mesh.axis_types)))

            def whole(*arrays: jax.Array) -> Result:
                known = dict(zip(given, arrays, strict=True))
                positional, named = jax.tree.unflatten(structure, [known.get(i, x) for i, x in enumerate(leaves)])
                return f(*positional, **named)

            spec = layout(*args, **kwargs)
            automatic = jax.jit(jax.sharding.auto_axes(whole, axes=axes, out_sharding=spec))
            with jax.sharding.use_abstract_mesh(mesh):
                result: Result = automatic(*(leaves[i] for i in given))
            return result

        return run

    return decorated


def _number_or_rows(*args: Any, reduction: str = "mean", **kwargs: Any) -> PartitionSpec:
    """Rows are split as the first array that is split."""
    if reduction != "none":
        return PartitionSpec()
    arrays = [x for x in jax.tree.leaves((args, kwargs)) if isinstance(x, jax.Array) and x.ndim]
    return next((split_of(x, 1) for x in arrays if _explicit(x) is not None), PartitionSpec())


def _explicit(x: jax.Array) -> Any:
    """The explicit mesh that splits an array, if there is one."""
    mesh = jax.typeof(x).sharding.mesh
    return mesh if AxisType.Explicit in mesh.axis_types else None
