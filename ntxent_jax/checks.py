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


def array(name: str, x: ArrayLike | Sequence[Any] | None) -> jax.Array:
    """``x`` as a JAX array, refused if it does not hold numbers or if JAX's dtype cannot hold its integers."""
    if isinstance(x, jax.Array) or hasattr(x, "__jax_array__"):  # The latter: a parameter of a module, as in flax.nnx.
        return jnp.asarray(x)
    if isinstance(x, (list, tuple)):
        _one_array(name, x)
    try:
        host = np.asarray(x)
    except ValueError:  # Parts of different shapes.
        host = np.empty((), object)
    strings = host.dtype.kind in "SUT" or (host.dtype.kind == "O" and any(isinstance(part, str) for part in host.flat))
    if host.dtype.kind == "O" and not strings:
        came = "None" if x is None else f"a {type(x).__name__}, which makes no such array"
        raise TypeError(f"{name} must be an array of numbers, got {came}")
    if strings:
        cure = f"; turn strings into integers with np.unique({name}, return_inverse=True)[1]"
        cure = cure if name.endswith(("labels", "ids")) else ""
        raise TypeError(f"{name} must hold numbers, got strings ({host.dtype}){cure}")
    if host.dtype.kind in "iu" and host.size:
        limits = np.iinfo(jax.dtypes.canonicalize_dtype(host.dtype))
        if host.min() < limits.min or host.max() > limits.max:
            raise ValueError(
                f"{name} holds integers that do not fit {limits.dtype}; number them with np.unique({name}, "
                "return_inverse=True)[1], or set jax.config.update('jax_enable_x64', True)"
            )
    return jnp.asarray(host)


def _one_array(name: str, x: Sequence[Any]) -> None:
    """Refuse what holds whole arrays: their rows could be put together in more than one way."""
    if hasattr(x, "_fields"):
        fields = " or ".join(f"{name}.{field}" for field in x._fields)
        raise TypeError(f"{name} must be an array of numbers, got a {type(x).__name__}; did you mean {fields}?")
    if any(getattr(part, "ndim", 0) > 1 for part in x):
        together = f"jnp.stack({name}, axis=1) if each row has several, jnp.concatenate({name}) if these are more rows"
        cure = "them one by one, ntxent_views(*views)" if name.startswith("views[") else together
        raise TypeError(f"{name} must be one array, got a {type(x).__name__} of arrays; pass {cure}")


def floating(name: str, x: ArrayLike) -> jax.Array:
    """``x`` as a floating array of any shape."""
    result = array(name, x)
    if not jnp.issubdtype(result.dtype, jnp.floating):
        doubt = "; or are these labels or ids?" if jnp.issubdtype(result.dtype, jnp.integer) else ""
        raise TypeError(f"{name} must be floating, got {result.dtype}; convert it with .astype(jnp.float32){doubt}")
    return result


def rows(name: str, x: ArrayLike, *shapes: str, ranks: tuple[int, ...] | None = ()) -> jax.Array:
    """``x`` as floating rows with at least one feature, of a rank as in ``shapes`` or ``ranks`` (None: any above 1)."""
    result = array(name, x)
    expected = set(range(2, 9)) if ranks is None else set(ranks) or {shape.count(",") + 1 for shape in shapes}
    if result.ndim == 0:
        possible = " or ".join(map(str, sorted(expected)[:2]))
        came = x if isinstance(x, (int, float, np.generic)) else "..."
        raise ValueError(f"{name} must have rank {possible}; did you mean temperature={came}?")
    result = floating(name, result)
    came = f"{name} must have shape {' or '.join(shapes)}, got {list(result.shape)}"
    try:
        chex.assert_rank(result, expected, exception_type=ValueError)
    except ValueError:
        raise ValueError(f"{came}; {_cure_of_rank(name, result.ndim > max(expected))}") from None
    if result.shape[-1] == 0:
        raise ValueError(f"{name} must have at least one feature, got shape {list(result.shape)}")
    return result


def _cure_of_rank(name: str, too_high: bool) -> str:
    if name.startswith("views["):
        one_by_one = "ntxent_views(*x), or ntxent_views(*jnp.unstack(x, axis=1)) if they are x[:, 0], x[:, 1], ..."
        return f"pass stacked views one by one, {one_by_one}" if too_high else "did you mean temperature=...?"
    return f"put its rows on one axis, {name}.reshape(-1, d)" if too_high else f"one row is {name}[None]"


def any_rows(name: str, x: ArrayLike) -> jax.Array:
    """``x`` as floating rows of any rank."""
    return rows(name, x, "[n, ...]", ranks=None)


def own_rows(name: str, x: jax.Array, n: int, rank: int) -> None:
    """Rows of rank ``rank`` are some for each of ``n`` anchors."""
    if x.ndim == rank and x.shape[0] != n:
        cure = f"; turn them with {name}.swapaxes(0, 1)" if x.shape[1] == n else ""
        raise ValueError(f"{name} of shape [n, k, d] must have n = {n}, some for each row, got {list(x.shape)}{cure}")


def guides(name: str, x: ArrayLike, n: int) -> jax.Array:
    """Rows of a guide model, one for each of ``n`` rows."""
    result = rows(name, x, "[n, e]")
    if result.shape[0] != n:
        raise ValueError(f"{name} must have a row for each of the {n} rows that it guides, got {list(result.shape)}")
    return result


def paired(names: tuple[str, str], n: int, m: int) -> None:
    """Every query needs its key."""
    if m < n:
        raise ValueError(f"{names[1]} must have a row for each of the {n} rows of {names[0]}, got {m}")


def one_key_each(n: int, m: int) -> None:
    """Without in-batch negatives there is one key for each query."""
    if m != n:
        raise ValueError(f"in_batch=False uses one key for each query, got {m} for {n}; pass the others as negatives")


def equal_lengths(names: tuple[str, str], n: int, m: int) -> None:
    """Pairs that choose in both directions."""
    if m != n:
        raise ValueError(f"{names[0]} and {names[1]} must have equally many rows, got {n} and {m}")


def equal_shapes(**named: jax.Array) -> None:
    """Two arrays whose rows belong together."""
    if len({x.shape for x in named.values()}) > 1:
        shapes = " and ".join(str(list(x.shape)) for x in named.values())
        raise ValueError(f"{' and '.join(named)} must have the same shape, got {shapes}")


def some_views(name: str, x: jax.Array) -> None:
    """Rows ``[n, d]``, or ``[n, views, d]`` of at least one view."""
    if 0 in x.shape[1:]:
        raise ValueError(f"{name} must have at least one view of each item, got shape {list(x.shape)}")


def views(shapes: Sequence[Shape]) -> None:
    """Two or more views of the same items."""
    if len(shapes) < 2:
        raise ValueError(f"ntxent_views needs two or more views, got {len(shapes)}; for labelled rows call ntxent")
    if len(set(shapes)) > 1:
        raise ValueError(f"views must all have the same shape [n, d], got {[list(shape) for shape in shapes]}")


def prior_alone(class_prior: ArrayLike, hardness: ArrayLike, label_smoothing: ArrayLike, cosine: bool) -> None:
    """A class prior bounds the negatives by a cosine, so the logits must be cosines."""
    named = {"class_prior": class_prior, "hardness": hardness, "label_smoothing": label_smoothing}
    given = [name for name, x in named.items() if not is_zero(x)]
    if "class_prior" in given and (len(given) > 1 or not cosine):
        came = " and ".join(given[1:]) or "another similarity"
        raise ValueError(f"class_prior is defined for plain cosine_similarity, got it with {came}; leave one out")


def something_to_choose(negatives: object, guide_keys: object) -> None:
    """Without in-batch negatives there must be others, and a guide has nothing to judge."""
    if negatives is None:
        raise ValueError("in_batch=False leaves no negatives; pass negatives of shape [n, k, d] or [k, d]")
    if guide_keys is not None:
        raise ValueError(
            "guide_keys judge in-batch negatives, which in_batch=False leaves out; leave the guide out too"
        )


def scalar(name: str, x: ArrayLike | None) -> jax.Array | None:
    """A real number, or None."""
    return None if x is None else one_number(name, x)


def whole_number(name: str, x: object, least: int = 1, most: int | None = None) -> int:
    """An integer known beforehand, of at least ``least`` and at most ``most``."""
    if not isinstance(x, (int, np.integer)) or isinstance(x, bool):
        cure = "; under jit it must be static, not traced" if isinstance(x, jax.Array) else ""
        raise TypeError(f"{name} must be an integer, got {x!r}{cure}")
    if x < least or (most is not None and x > most):
        limits = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be {limits}, got {x}")
    return int(x)


def positive_number(name: str, x: ArrayLike) -> jax.Array:
    """A scalar; if it is known on the host it must be > 0."""
    positive(name, x)
    return one_number(name, x)


def one_number(name: str, x: ArrayLike) -> jax.Array:
    """A scalar."""
    result = real(name, x)
    if result.shape not in ((), (1,)):
        raise ValueError(f"{name} must be a single number, got shape {list(result.shape)}")
    return result.reshape(())


def within(name: str, x: ArrayLike, low: float, high: float = float("inf")) -> None:
    """Numbers known on the host must lie from ``low`` to ``high``."""
    values = known(x)
    if values is not None and not np.all((values >= low) & (values <= high)):
        limits = f"at least {low:g}" if high == float("inf") else f"from {low:g} to {high:g}"
        raise ValueError(f"{name} must be {limits}, got {x}")


def option(name: str, x: ArrayLike, low: float, high: float) -> jax.Array | None:
    """A number in ``[low, high)``, NaN if it is traced and not; None if it is known on the host to be 0."""
    values = known(x)
    if values is not None and not np.all((values >= low) & (values < high)):
        raise ValueError(f"{name} must be at least {low:g} and below {high:g}, got {x}")
    if is_zero(x):
        return None
    result = one_number(name, x)
    return jnp.where((result >= low) & (result < high), result, jnp.nan)


def same_rows(**named: jax.Array) -> list[jax.Array]:
    """Rows to be compared: they must have equally many features, and get one dtype."""
    sizes = {name: x.shape[-1] for name, x in named.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"{' and '.join(sizes)} must have equally many features, got {sizes}; project one side to the other first"
        )
    dtype = jnp.result_type(*named.values())
    return [x.astype(dtype) for x in named.values()]


def shaped(name: str, x: jax.Array, *shapes: Shape, each: str = "row") -> jax.Array:
    """``x``, one entry per ``each``, must have one of ``shapes`` exactly: a size of 1 would broadcast silently."""
    if x.shape not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        cure = f"; pass {name}[..., 0]" if x.shape[-1:] == (1,) and x.shape[:-1] in shapes else ""
        raise ValueError(f"{name} must have shape {expected}, one entry per {each}, got {list(x.shape)}{cure}")
    return x


def ids(name: str, x: ArrayLike | None, shape: Shape) -> jax.Array | None:
    """Integers of the given shape, or None."""
    return None if x is None else integers(name, x, shape)


def integers(name: str, x: ArrayLike, shape: Shape) -> jax.Array:
    """Integers or booleans of the given shape."""
    result = array(name, x)
    if result.size == 0:
        result = result.astype(jnp.int32)  # An empty list has no dtype of its own.
    if result.ndim == len(shape) + 1:
        cure = f"{name}[..., 0]" if result.shape[-1] == 1 else f"{name}.argmax(-1) of one-hot rows"
        if name == "labels" and jnp.issubdtype(result.dtype, jnp.floating):
            cure += ", or call ntxent_views if these are rows of a second view"
        came = f"{name} must have shape {list(shape)}, one entry per row, got {list(result.shape)}"
        raise ValueError(f"{came}; pass {cure}")
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


def mask(name: str, x: ArrayLike | None, shape: Shape, *, each: str = "row") -> jax.Array | None:
    """A boolean mask of the given shape, or None."""
    if x is None:
        return None
    result = array(name, x)
    if result.dtype != jnp.bool_:
        raise TypeError(f"{name} must be boolean (True = real), got {result.dtype}; convert it with .astype(bool)")
    return shaped(name, result, shape, each=each)


def numbers(name: str, x: ArrayLike | None, *shapes: Shape, each: str = "row") -> jax.Array | None:
    """Real numbers of one of ``shapes``, or None."""
    return None if x is None else shaped(name, real(name, x), *shapes, each=each)


def real(name: str, x: ArrayLike) -> jax.Array:
    """Real numbers of any shape."""
    if x is None:
        raise TypeError(f"{name} must be a number, got None")
    result = array(name, x)
    if not (jnp.issubdtype(result.dtype, jnp.floating) or jnp.issubdtype(result.dtype, jnp.integer)):
        raise TypeError(f"{name} must hold real numbers, got {result.dtype}")
    return result


def known(x: object) -> np.ndarray[Any, np.dtype[Any]] | None:
    """The numbers of ``x`` if they are known beforehand; those of a JAX array are not looked at."""
    if isinstance(x, (list, tuple)):
        host = not any(isinstance(part, jax.Array) for part in jax.tree.leaves(x))
    else:
        host = isinstance(x, (int, float, np.ndarray, np.generic))
    if not host:
        return None
    try:
        values = np.asarray(x)
    except ValueError:  # Parts of different shapes, refused where the array is made.
        return None
    return values if values.dtype.kind in "biuf" else None


def is_zero(x: object) -> bool:
    """Whether a number is known beforehand to be 0."""
    values = known(x)
    return values is not None and values.size == 1 and not values.any()


def positive(name: str, x: ArrayLike) -> None:
    """Numbers known on the host must be > 0."""
    values = known(x)
    if values is not None and not np.all(values > 0):
        cure = "; it divides the similarities (0.07 and 0.5 are usual)" if name == "temperature" else ""
        raise ValueError(f"{name} must be > 0, got {x}{cure}")


def temperature(x: ArrayLike, n: int, where: ArrayLike | None = None, each: str = "row") -> jax.Array:
    """A temperature for all rows, shape ``[]``, or one per ``each``, ``[n]``; values known on the host must be > 0.

    Not those of rows that are padding, or may be.
    """
    if where is None or np.ndim(x) == 0:
        positive("temperature", x)
    elif (values := known(x)) is not None and (flags := known(where)) is not None and values.shape == flags.shape:
        positive("temperature", values[flags.astype(bool)])
    result = shaped("temperature", real("temperature", x), (), (1,), (n,), each=each)
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
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def yes_or_no(**named: object) -> None:
    """Choices known beforehand."""
    for name, value in named.items():
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError(f"{name} must be True or False, known beforehand, got {value!r}")


def options(reduction: object, similarity: object, block_size: object, precision: object) -> None:
    """The options that all losses share."""
    choice("reduction", reduction, ("mean", "anchor_mean", "sum", "none"))
    if not callable(similarity):
        raise TypeError(
            f"similarity must be a function (x [n, d], y [m, d]) -> [n, m], got {similarity!r}; pass for instance "
            "ntxent_jax.cosine_similarity or ntxent_jax.dot_product"
        )
    rows_in_block(block_size)
    if precision is not None:
        choice("precision", precision, ("default", "high", "highest", "bfloat16", "tensorfloat32", "float32"))


def rows_in_block(block_size: object) -> None:
    """A number of rows, or None for the automatic choice."""
    whole = isinstance(block_size, (int, np.integer)) and not isinstance(block_size, bool) and block_size >= 1
    if block_size is not None and not whole:
        raise ValueError(f"block_size must be a positive int or None (chosen automatically), got {block_size!r}")


def pair_list(name: str, x: ArrayLike) -> jax.Array:
    """Pairs of row numbers."""
    result = array(name, x)
    if result.size == 0:
        result = jnp.zeros((0, 2), jnp.int32)
    if not jnp.issubdtype(result.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers (anchor row, candidate row), got {result.dtype}")
    if result.ndim != 2 or result.shape[1] != 2:
        raise ValueError(
            f"{name} must have shape [p, 2], each row (anchor row, candidate row), got {list(result.shape)}"
        )
    if result.dtype.itemsize < 4:
        return result.astype(jnp.int32)
    if jnp.issubdtype(result.dtype, jnp.unsignedinteger):  # Holds no -1, and must not become one.
        signed = np.dtype(f"int{8 * result.dtype.itemsize}")
        result = jnp.minimum(result, np.iinfo(signed).max).astype(signed)
    return result


def similarity_result(scores: jax.Array, n: int, m: int) -> jax.Array:
    """What a user's similarity returned for ``n`` anchors and ``m`` candidates."""
    result = floating("the result of similarity", scores)
    if result.shape != (n, m):
        raise ValueError(
            f"similarity must return shape [n, m] = [{n}, {m}] for n anchors and m candidates, got {list(result.shape)}"
        )
    return result
