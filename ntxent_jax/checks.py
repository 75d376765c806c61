"""What comes in: arrays made canonical, and errors that name the argument, what came, what was expected, the cure.

A wrong dtype is a ``TypeError``, all else a ``ValueError``. Only shapes, dtypes and host values are looked at, so under
``jit`` all of it happens once, while tracing. ``chex`` does the checks whose absence would end in an error anyway, and
``chex.disable_asserts()`` switches those off. What would broadcast or wrap around silently is checked without it.
"""

from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

Shape = tuple[int, ...]


def array(name: str, x: ArrayLike | Sequence[Any]) -> jax.Array:
    """``x`` as a JAX array, refused if it does not hold numbers or if JAX's dtype cannot hold its integers."""
    if isinstance(x, jax.Array) or hasattr(x, "__jax_array__"):  # The latter: a parameter of a module, as in flax.nnx.
        return jnp.asarray(x)
    host = np.asarray(x)
    if host.dtype.kind in "OSUT":
        raise TypeError(
            f"{name} must hold numbers, got {host.dtype}; turn strings into integers with "
            f"np.unique({name}, return_inverse=True)[1]"
        )
    if host.dtype.kind in "iu" and host.size:
        limits = np.iinfo(jax.dtypes.canonicalize_dtype(host.dtype))
        if host.min() < limits.min or host.max() > limits.max:
            raise ValueError(
                f"{name} holds integers that do not fit {limits.dtype}; number them with np.unique({name}, "
                "return_inverse=True)[1], or set jax.config.update('jax_enable_x64', True)"
            )
    return jnp.asarray(host)


def floating(name: str, x: ArrayLike) -> jax.Array:
    """``x`` as a floating array of any shape."""
    result = array(name, x)
    if not jnp.issubdtype(result.dtype, jnp.floating):
        raise TypeError(f"{name} must be floating, got {result.dtype}; convert it with .astype(jnp.float32)")
    return result


def rows(name: str, x: ArrayLike, *shapes: str) -> jax.Array:
    """``x`` as floating rows with at least one feature, of a rank among those of ``shapes``."""
    ranks = [shape.count(",") + 1 for shape in shapes]
    result = array(name, x)
    if result.ndim == 0:
        raise ValueError(f"{name} must have rank {' or '.join(map(str, ranks))}; did you mean temperature={x}?")
    result = floating(name, result)
    came = f"{name} must have shape {' or '.join(shapes)}, got {list(result.shape)}"
    chex.assert_rank(result, set(ranks), custom_message=came, exception_type=ValueError)
    if result.shape[-1] == 0:
        raise ValueError(f"{name} must have at least one feature, got shape {list(result.shape)}")
    return result


def own_rows(name: str, x: jax.Array, n: int) -> jax.Array:
    """Rows for all queries, or some for each of the ``n`` queries."""
    if x.ndim == 3 and x.shape[0] != n:
        raise ValueError(f"{name} of shape [n, k, d] must have n = {n} like the queries, got {list(x.shape)}")
    return x


def paired(names: tuple[str, str], n: int, m: int, in_batch: bool, negatives: object) -> None:
    """Every query needs its key, and something to tell it from."""
    if m < n:
        raise ValueError(f"{names[1]} must have a row for each of the {n} rows of {names[0]}, got {m}")
    if not in_batch and negatives is None:
        raise ValueError("in_batch=False leaves no negatives; pass negatives of shape [n, k, d] or [k, d]")
    if not in_batch and m != n:
        raise ValueError(
            f"in_batch=False uses one key for each query, got {m} for {n}; pass the others as negatives[{m - n}, d]"
        )


def views(shapes: Sequence[Shape]) -> None:
    """Two or more views of the same items."""
    if len(shapes) < 2:
        raise ValueError(f"ntxent_views needs two or more views, got {len(shapes)}; for labelled rows call ntxent")
    if len(set(shapes)) > 1:
        raise ValueError(f"views must all have the same shape [n, d], got {[list(shape) for shape in shapes]}")


def same_rows(**named: jax.Array) -> list[jax.Array]:
    """Rows to be compared: they must have equally many features, and get one dtype."""
    sizes = {name: x.shape[-1] for name, x in named.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"{' and '.join(sizes)} must have equally many features, got {sizes}")
    dtype = jnp.result_type(*named.values())
    return [x.astype(dtype) for x in named.values()]


def shaped(name: str, x: jax.Array, *shapes: Shape) -> jax.Array:
    """``x`` must have one of ``shapes`` exactly: a size of 1 would broadcast silently."""
    if x.shape not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name} must have shape {expected}, one entry per row, got {list(x.shape)}")
    return x


def ids(name: str, x: ArrayLike | None, shape: Shape) -> jax.Array | None:
    """Integers of the given shape, or None."""
    return None if x is None else integers(name, x, shape)


def integers(name: str, x: ArrayLike, shape: Shape) -> jax.Array:
    """Integers or booleans of the given shape."""
    result = array(name, x)
    if result.size == 0:
        result = result.astype(jnp.int32)  # An empty list has no dtype of its own.
    if not (jnp.issubdtype(result.dtype, jnp.integer) or result.dtype == jnp.bool_):
        raise TypeError(
            f"{name} must be integers, got {result.dtype}; turn other values into integers with "
            f"np.unique({name}, return_inverse=True)[1]"
        )
    return shaped(name, result, shape)


def comparable(**named: jax.Array | None) -> None:
    """Refuse integer dtypes that no available integer dtype can hold together: a comparison would wrap or round."""
    dtypes = {name: x.dtype for name, x in named.items() if x is not None}
    if not dtypes:
        return
    common = jax.dtypes.canonicalize_dtype(
        jnp.promote_types(*dtypes.values()) if len(dtypes) > 1 else next(iter(dtypes.values()))
    )
    if common.kind == "f" or not all(np.can_cast(dtype, common, "safe") for dtype in dtypes.values()):
        came = " and ".join(f"{name} ({dtype})" for name, dtype in dtypes.items())
        raise TypeError(f"{came} cannot be compared exactly; convert both to one dtype")


def mask(name: str, x: ArrayLike | None, shape: Shape) -> jax.Array | None:
    """A boolean mask of the given shape, or None."""
    if x is None:
        return None
    result = array(name, x)
    if result.dtype != jnp.bool_:
        raise TypeError(f"{name} must be boolean (True = real), got {result.dtype}; convert it with .astype(bool)")
    return shaped(name, result, shape)


def numbers(name: str, x: ArrayLike | None, *shapes: Shape) -> jax.Array | None:
    """Real numbers of one of ``shapes``, or None."""
    if x is None:
        return None
    result = array(name, x)
    if not (jnp.issubdtype(result.dtype, jnp.floating) or jnp.issubdtype(result.dtype, jnp.integer)):
        raise TypeError(f"{name} must hold real numbers, got {result.dtype}")
    return shaped(name, result, *shapes)


def positive(name: str, x: ArrayLike) -> None:
    """Numbers known on the host must be > 0."""
    if isinstance(x, (int, float, np.ndarray, np.generic)) and not np.all(np.asarray(x) > 0):
        raise ValueError(f"{name} must be > 0, got {x}; it divides the similarities (0.07 and 0.5 are usual)")


def temperature(x: ArrayLike, n: int) -> jax.Array:
    """A temperature for all rows, shape ``[]``, or one for each, ``[n]``; values known on the host must be > 0."""
    positive("temperature", x)
    result = numbers("temperature", x, (), (1,), (n,))
    assert result is not None
    return result.reshape(()) if result.size == 1 else result


def together(**named: object) -> None:
    """Arguments that have a meaning only if all of them, or none, are given."""
    missing = [name for name, value in named.items() if value is None]
    if missing and len(missing) < len(named):
        given = [name for name in named if name not in missing]
        raise ValueError(f"{' and '.join(given)} given without {' and '.join(missing)}; pass both or neither")


def only_with(partner: str, **named: object) -> None:
    """Arguments that say something about ``partner``, which was not given."""
    for name, value in named.items():
        if value is not None:
            raise ValueError(f"{name} given without {partner}; pass both or neither")


def vector_shape(name: str, x: ArrayLike) -> Shape:
    """Shape of a vector."""
    shape = array(name, x).shape
    if len(shape) != 1:
        raise ValueError(f"{name} must have shape [n], one entry per row, got {list(shape)}")
    return shape


def choice(name: str, value: object, choices: Sequence[str]) -> None:
    """A closed choice."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def block_size(value: object) -> None:
    """A number of rows, or None for the automatic choice."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(f"block_size must be a positive int or None (chosen automatically), got {value!r}")


def precision(value: object) -> None:
    """A precision of matrix products."""
    if value is not None:
        choice("precision", value, ("default", "high", "highest", "bfloat16", "tensorfloat32", "float32"))


def similarity(value: object) -> None:
    """A function of two blocks of rows."""
    if not callable(value):
        raise TypeError(
            f"similarity must be a function (x [n, d], y [m, d]) -> [n, m], got {value!r}; pass for instance "
            "ntxent_jax.cosine_similarity or ntxent_jax.dot_product"
        )


def similarity_result(scores: jax.Array, n: int, m: int) -> jax.Array:
    """What a user's similarity returned for ``n`` anchors and ``m`` candidates."""
    result = floating("the result of similarity", scores)
    if result.shape != (n, m):
        raise ValueError(
            f"similarity must return shape [n, m] = [{n}, {m}] for n anchors and m candidates, got {list(result.shape)}"
        )
    return result
