"""House rules that one file shows by itself: forbidden names, sizes, docstrings, real bodies."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SHIPPED = ("k3jax", "pallas_kernels", "configs", "experiments", "benchmarks")

FILE_LINES = 500
ENTRY_LINES = 60
FUNCTION_LINES = 60  # fits a screen; the docstring is not counted
KERNEL_LINES = 120  # a kernel's body is one straight line of thought

# Name -> what to write instead. An explicit mesh carries the sharding in the array's type, and
# Linen is used as a thin owner of parameters.
FORBIDDEN = {
    "with_sharding_constraint": "out_sharding= or jax.sharding.reshard",
    "with_partitioning": "out_sharding= in the initializer",
    "with_logical_constraint": "out_sharding= or jax.sharding.reshard",
    "with_logical_partitioning": "out_sharding= in the initializer",
    "FrozenDict": "a plain dict",
    "pjit": "jax.jit",
    "nnx": "flax.linen",
}
MESHES = ("Mesh", "AbstractMesh", "make_mesh", "set_mesh", "shard_map")
SECTION = re.compile(r"^( *)(?:Args|Attributes|Raises|Returns):\n(?!\1  \S)", re.MULTILINE)
LINEN = ("Module", "compact", "scan", "remat", "broadcast", "initializers")
COLLECTIVES = (
    "psum",
    "pmean",
    "pmax",
    "pmin",
    "ppermute",
    "all_gather",
    "all_to_all",
    "psum_scatter",
    "axis_index",
    "pvary",
)


def last(node: ast.AST) -> str:
    """The last word of a dotted expression: jax.lax.psum -> psum."""
    return ast.unparse(node).rpartition(".")[2]


def functions(tree: ast.AST):
    """Every function in `tree`, nested ones and methods too."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def is_shipped(path: str) -> bool:
    """Whether the file at `path` is product code, not a test."""
    return path.partition("/")[0] in SHIPPED


def is_spelled_out(call: ast.Call) -> bool:
    """Whether a spec is a literal: it names an axis, or nothing in it is computed."""
    parts = [part for argument in call.args for part in ast.walk(argument)]
    names = [p for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str)]
    computed = [p for p in parts if isinstance(p, ast.Name | ast.Call | ast.Starred)]
    return bool(names) or not computed


def check_names(path: str, source: str) -> list[str]:
    """Forbidden names, Linen beyond the subset, specs and collectives outside their room."""
    wrong = []
    tree = ast.parse(source)
    linen = "flax" in source and path.startswith("k3jax/")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Name):
            names = [node.id]
        else:
            continue
        at = f"{path}:{node.lineno}: "
        wrong += [f"{at}{n} is forbidden; use {FORBIDDEN[n]}" for n in names if n in FORBIDDEN]
        if not is_shipped(path):
            continue
        if path.startswith("pallas_kernels/"):
            hits = [n for n in names if n in MESHES]
            wrong += [f"{at}{n}: a kernel's contract is one device's arrays" for n in hits]
        if not path.startswith("k3jax/parallel/"):
            hits = [n for n in names if n in COLLECTIVES]
            wrong += [f"{at}{n} communicates; it belongs in k3jax/parallel" for n in hits]
        if linen and isinstance(node, ast.Attribute) and ast.unparse(node.value) == "nn":
            if node.attr not in LINEN:
                wrong.append(f"{at}nn.{node.attr} is outside the subset nn.{', nn.'.join(LINEN)}")
    wrong += [
        f"{path}:{call.lineno}: a spec is spelled out; k3jax/parallel/specs.py names it by role"
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and last(call.func) in ("P", "PartitionSpec")
        if is_shipped(path) and path != "k3jax/parallel/specs.py" and is_spelled_out(call)
    ]
    modules = [c for c in ast.walk(tree) if isinstance(c, ast.ClassDef)]
    wrong += [
        f"{path}:{method.lineno}: setup() is forbidden; make parameters in one nn.compact method"
        for module in modules
        if any(last(base) == "Module" for base in module.bases)
        for method in module.body
        if isinstance(method, ast.FunctionDef) and method.name == "setup"
    ]
    return wrong


def check_size(path: str, source: str) -> list[str]:
    """Files of at most 500 lines, entry points of 60, functions that fit a screen."""
    lines = len(source.splitlines())
    allowed = ENTRY_LINES if path.startswith("experiments/") else FILE_LINES
    wrong = [f"{path}: {lines} lines, at most {allowed}; split it"] if lines > allowed else []
    longest = KERNEL_LINES if path.startswith("pallas_kernels/") else FUNCTION_LINES
    for function in functions(ast.parse(source)):
        start = function.lineno
        if ast.get_docstring(function) and len(function.body) > 1:
            start += function.body[0].end_lineno - function.body[0].lineno + 1
        length = function.end_lineno - start + 1
        if length > longest:
            name = f"{path}:{function.lineno}: {function.name}"
            wrong.append(f"{name} has {length} lines without its docstring, at most {longest}")
    return wrong


def check_docstrings(path: str, source: str) -> list[str]:
    """A docstring on every module, and on all public functions, classes and methods of the product.

    `__call__` and the other magic methods are documented by their class.
    """
    tree = ast.parse(source)
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    wrong = [] if ast.get_docstring(tree) else [f"{path}: the module has no docstring"]
    public = [n for n in tree.body if isinstance(n, kinds) and not n.name.startswith("_")]
    for node in [*public]:
        if isinstance(node, ast.ClassDef):
            public += [m for m in node.body if isinstance(m, kinds) and m.name[0] != "_"]
    if is_shipped(path):
        bare = [node for node in public if not ast.get_docstring(node)]
        wrong += [f"{path}:{node.lineno}: {node.name} has no docstring" for node in bare]
    for node in [n for n in ast.walk(tree) if isinstance(n, (*kinds.__args__, ast.Module))]:
        if SECTION.search(ast.get_docstring(node) or ""):
            where = f"{path}:{getattr(node, 'lineno', 1)}"
            wrong.append(f"{where}: a docstring's sections are indented by two spaces")
    return wrong


def check_bodies(path: str, source: str) -> list[str]:
    """No stubs: bodies that do nothing, NotImplementedError, and assertions of a constant."""
    wrong = []
    tree = ast.parse(source)
    protocols = [c for c in ast.walk(tree) if isinstance(c, ast.ClassDef)]
    protocols = [c for c in protocols if any(last(base) == "Protocol" for base in c.bases)]
    declared = {id(method) for protocol in protocols for method in protocol.body}
    for node in ast.walk(tree):
        at = f"{path}:{getattr(node, 'lineno', 0)}: "
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ExceptHandler):
            if id(node) not in declared and all(map(is_empty, node.body)):
                wrong.append(f"{at}the body does nothing")
        elif isinstance(node, ast.Raise) and node.exc:
            if "NotImplementedError" in ast.unparse(node.exc):
                wrong.append(f"{at}NotImplementedError; raise ValueError with the way out")
        elif isinstance(node, ast.Assert) and isinstance(node.test, ast.Constant):
            wrong.append(f"{at}asserts a constant")
    return wrong


def is_empty(statement: ast.stmt) -> bool:
    """Whether a statement is `pass`, `...` or a docstring."""
    constant = isinstance(getattr(statement, "value", None), ast.Constant)
    return isinstance(statement, ast.Pass) or (isinstance(statement, ast.Expr) and constant)


CHECKS = (check_names, check_size, check_docstrings, check_bodies)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_python_file_keeps_the_house_rules(check):
    files = sorted(f for folder in (*SHIPPED, "tests") for f in (ROOT / folder).rglob("*.py"))
    wrong = [
        line for f in files for line in check(f.relative_to(ROOT).as_posix(), f.read_text("utf-8"))
    ]
    assert files
    assert not wrong, "\n".join(wrong)


LAYER, KERNEL = "k3jax/layers/kda.py", "pallas_kernels/kda/api.py"
LINEN_IMPORT = "from flax import linen as nn\n"


@pytest.mark.parametrize(
    ("check", "path", "source"),
    [
        (check_names, LAYER, "x = jax.lax.with_sharding_constraint(x, s)"),
        (check_names, "tests/test_a.py", "from jax.lax import with_sharding_constraint"),
        (check_names, LAYER, "init = nn.with_partitioning(init, axes)"),
        (check_names, LAYER, "y = nn.with_logical_constraint(x, axes)"),
        (check_names, LAYER, LINEN_IMPORT + "y = nn.Dense(4)(x)"),
        (check_names, LAYER, LINEN_IMPORT + "f = nn.jit(f)"),
        (check_names, LAYER, LINEN_IMPORT + "f = nn.custom_vjp(f, g, h)"),
        (
            check_docstrings,
            LAYER,
            '"""A."""\ndef f(x):\n    """B.\n\n    Args:\n        x: C.\n    """\n',
        ),
        (check_names, LAYER, "from flax.core import FrozenDict"),
        (check_names, LAYER, "from flax import nnx"),
        (check_names, LAYER, "f = pjit(f)"),
        (check_names, LAYER, "class A(nn.Module):\n    def setup(self):\n        self.a = 1"),
        (check_names, LAYER, "spec = P('data')"),
        (check_names, LAYER, "spec = jax.sharding.PartitionSpec(('data', 'expert'), None)"),
        (check_names, LAYER, "spec = jax.P()"),
        (check_names, LAYER, "spec = PartitionSpec(*axes, 'data')"),
        (check_names, KERNEL, "spec = PartitionSpec('data')"),
        (check_names, KERNEL, "mesh = jax.make_mesh((1,), ('data',))"),
        (check_names, KERNEL, "y = jax.shard_map(f)(x)"),
        (check_names, LAYER, "y = jax.lax.psum(x, 'data')"),
        (check_size, LAYER, "x = 1\n" * 501),
        (check_size, "experiments/train.py", "x = 1\n" * 61),
        (check_size, LAYER, "def f():\n" + "    x = 1\n" * 60),
        (check_size, KERNEL, "def f():\n" + "    x = 1\n" * 120),
        (check_docstrings, LAYER, "x = 1"),
        (check_docstrings, LAYER, '"""M."""\ndef f():\n    return 1'),
        (check_docstrings, LAYER, '"""M."""\nclass A:\n    x = 1'),
        (check_docstrings, LAYER, '"""M."""\nclass A:\n    "A."\n    def f(self):\n        g()'),
        (check_bodies, LAYER, "def f():\n    pass"),
        (check_bodies, LAYER, "def f():\n    '''Later.'''\n    ..."),
        (check_bodies, LAYER, "try:\n    f()\nexcept ValueError:\n    pass"),
        (check_bodies, LAYER, "def f():\n    raise NotImplementedError"),
        (check_bodies, "tests/test_a.py", "def test_a():\n    assert True"),
    ],
)
def test_a_planted_violation_is_found_once(check, path, source):
    assert len(check(path, source)) == 1


@pytest.mark.parametrize(
    ("check", "path", "source"),
    [
        (check_names, "k3jax/parallel/specs.py", "from jax.sharding import PartitionSpec as P"),
        (check_names, "k3jax/optim/owners.py", "spec = PartitionSpec(*(n or None for n in names))"),
        (check_names, "k3jax/parallel/tokens.py", "y = lax.psum(x, 'data')"),
        (check_names, "tests/test_a.py", "spec = P('data')\ny = jax.lax.psum(x, 'data')"),
        (check_names, LAYER, "# nn.Dense and with_partitioning are not used\ny = jax.nn.silu(x)"),
        (check_names, LAYER, LINEN_IMPORT + "class A(nn.Module):\n    'A.'\nb = nn.scan(A)"),
        (check_size, LAYER, "x = 1\n" * 500),
        (check_size, LAYER, 'def f():\n    """' + "D\n" * 40 + '"""\n' + "    x = 1\n" * 59),
        (check_docstrings, LAYER, '"""M."""\ndef f():\n    "F."\n\ndef _g():\n    return 1'),
        (check_docstrings, "tests/test_a.py", '"""M."""\ndef test_a():\n    assert f()'),
        (
            check_docstrings,
            LAYER,
            '"""M."""\nclass A:\n    "A."\n    def __call__(self):\n        g()',
        ),
        (check_bodies, LAYER, "class A(Protocol):\n    def f(self):\n        'F.'"),
        (check_bodies, LAYER, "class A(ValueError):\n    'A.'\n\ndef f():\n    return None"),
    ],
)
def test_code_within_the_house_rules_passes(check, path, source):
    assert check(path, source) == []
