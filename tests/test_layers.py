"""The shape of the package: imports go one way, files and functions stay short, every public name is explained."""

import ast
import doctest
import inspect
from pathlib import Path

import pytest

import ntxent_jax

PACKAGE = Path(ntxent_jax.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
# From the lowest to the highest. A module imports only from modules of a line above its own.
LAYERS = [
    ["checks"],
    ["devices", "numerics"],
    ["similarities"],
    ["pairs"],
    ["formulas"],
    ["engine"],
    ["batch"],
    ["scores", "two_sided"],
    ["ring"],
    ["coupled"],
    ["contrast", "inputs"],
    [
        "label_losses",
        "view_losses",
        "query_losses",
        "two_tower_losses",
        "pair_losses",
        "diagnostics",
        "queues",
        "caching",
        "prefixes",
        "sampling",
        "geometry",
        "retrieval",
    ],
    ["__init__"],
]
WITHIN_A_LAYER = {("view_losses", "label_losses")}
HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}
BANNED = ["type: ignore", "noqa", "pragma", "1e9", "1e-8", "+SKIP", "TODO", "FIXME", "NotImplementedError"]
PUBLIC = [(name, getattr(ntxent_jax, name)) for name in ntxent_jax.__all__]

each_module = pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
each_public_name = pytest.mark.parametrize(("name", "value"), PUBLIC, ids=[name for name, _ in PUBLIC])


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_from_package(tree: ast.Module) -> set[str]:
    """Modules of the package that a module imports, wherever in it the import stands."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            if origin in {".", "ntxent_jax"}:
                found |= {alias.name for alias in node.names}
            elif origin.startswith((".", "ntxent_jax.")):
                found.add(origin.removeprefix("ntxent_jax").lstrip(".").split(".")[0])
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("ntxent_jax.") for alias in node.names if "ntxent_jax" in alias.name}
    return found


def assert_imports_go_down(name: str, imports: set[str]) -> None:
    for other in sorted(imports):
        assert other in HEIGHT, f"{name} imports {other}, which has no place in LAYERS"
        below = HEIGHT[other] < HEIGHT[name] or (name, other) in WITHIN_A_LAYER
        assert below, f"{name} imports {other}, which does not lie below it"


def body_length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function from its first statement to its last, the docstring not counted."""
    body = function.body[ast.get_docstring(function) is not None :]
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


@each_module
def test_imports_go_one_way(path: Path) -> None:
    assert path.stem in HEIGHT, f"{path.stem} has no place in LAYERS"
    assert_imports_go_down(path.stem, imports_from_package(tree_of(path)))


@pytest.mark.parametrize(
    "source",
    [
        "from ntxent_jax.engine import anything",
        "from .engine import anything",
        "from . import engine",
        "from ntxent_jax import engine",
        "import ntxent_jax.engine",
        "import ntxent_jax.engine as shorter",
        "import ntxent_jax",
        "def late():\n    from ntxent_jax.engine import anything",
    ],
)
def test_an_import_upwards_is_seen(source: str) -> None:
    with pytest.raises(AssertionError, match=r"below|no place"):
        assert_imports_go_down("numerics", imports_from_package(ast.parse(source)))


def test_init_is_only_a_version_and_a_list_of_public_names() -> None:
    tree = tree_of(PACKAGE / "__init__.py")
    docstring, *rest = tree.body
    assert ast.get_docstring(tree)
    assert isinstance(docstring, ast.Expr)
    *imports, version, names = rest
    assert all(isinstance(node, ast.ImportFrom) for node in imports)
    assert isinstance(version, ast.Assign)
    assert ast.unparse(version.targets[0]) == "__version__"
    assert isinstance(names, ast.Assign)
    assert ast.unparse(names.targets[0]) == "__all__"
    imported = [alias.name for node in imports if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(imported) == sorted(ast.literal_eval(names.value))


@each_module
def test_files_and_functions_stay_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 500, "is it two ideas?"
    functions = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert {node.name: body_length(node) for node in functions if body_length(node) > 40} == {}


@each_module
def test_no_banned_text(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert [text for text in BANNED if text in source] == []


@each_public_name
def test_public_names_are_explained(name: str, value: object) -> None:
    docstring = inspect.getdoc(value)
    assert docstring, "no docstring"
    if isinstance(value, type):
        headings = ["Attributes:"]
    else:
        headings = ["Args:", "Returns:"]
        assert doctest.DocTestParser().get_examples(docstring), "no example that runs"
    lines = [line.strip() for line in docstring.splitlines()]
    assert [heading for heading in headings if heading not in lines] == []
    if not isinstance(value, type):
        assert {"Example:", "Examples:"} & set(lines), "no section Example"


@each_public_name
def test_arguments_are_explained(name: str, value: object) -> None:
    if isinstance(value, type):
        arguments = list(value._fields)
    else:
        assert callable(value)
        arguments = list(inspect.signature(value).parameters)
        assert "Union[" not in str(inspect.signature(value)), "help() shows what ArrayLike is made of"
    docstring = inspect.getdoc(value) or ""
    assert [argument for argument in arguments if f"\n    {argument}: " not in docstring.replace("*", "")] == []


def test_names_of_options_are_the_same_everywhere() -> None:
    """One word per concept: no other name for the temperature, and options are keyword-only."""
    for name, value in PUBLIC:
        if isinstance(value, type):
            continue
        parameters = inspect.signature(value).parameters
        assert not {"tau", "scale", "logit_scale", "mask", "T"} & set(parameters), name
        positional = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        optional = [p for p in positional if parameters[p].default is not inspect.Parameter.empty]
        allowed = {"temperature", "bias", "axis", "negatives", "candidate_labels", "keys", "weights"}
        assert set(optional) <= allowed, f"{name}: {optional} must be keyword-only"
