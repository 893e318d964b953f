"""Import rules: arrows between our packages go one way, and each library has one home."""

import ast
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("k3jax", "pallas_kernels", "configs", "experiments", "benchmarks")

# Row: package -> the packages of ours that it may import besides itself. The longest prefix rules.
LEAF = ("k3jax.config", "k3jax.parallel.specs", "pallas_kernels")
LAYERS = ("k3jax.config", "k3jax.parallel", "pallas_kernels")
MODELS = (*LAYERS, "k3jax.layers", "k3jax.vision", "k3jax.quant")
TRAIN = (*MODELS, "k3jax.models", "k3jax.optim", "k3jax.data")
ARROWS = {
    "pallas_kernels": (),
    "k3jax.config": (),
    "k3jax.parallel": ("k3jax.config", "pallas_kernels"),
    "k3jax.optim": LEAF,
    "k3jax.quant": LEAF,
    "k3jax.data": LEAF,
    "k3jax.layers": LAYERS,
    "k3jax.vision": (*LAYERS, "k3jax.layers"),
    "k3jax.models": MODELS,
    "k3jax.train": TRAIN,
    "k3jax.serve": (*MODELS, "k3jax.models", "k3jax.data"),
    "k3jax.eval": (*MODELS, "k3jax.models", "k3jax.data"),
    "k3jax.rl": (*TRAIN, "k3jax.train", "k3jax.serve"),
    "benchmarks": ("k3jax", "pallas_kernels"),
    "configs": ("k3jax", "pallas_kernels"),
    "experiments": ("configs", "k3jax", "pallas_kernels"),
}

# Row: library -> where it may be imported. Nothing listed means nowhere.
HOMES = {
    "flax": ("k3jax.layers", "k3jax.vision", "k3jax.models"),
    "optax": ("k3jax.optim",),
    "orbax": ("k3jax.train.checkpoint",),
    "grain": ("k3jax.data",),
    "tokenizers": ("k3jax.data",),
    "tiktoken": ("k3jax.data",),
    "starlette": ("k3jax.serve.server",),
    "uvicorn": ("k3jax.serve.server",),
    "lm_eval": ("k3jax.eval.harness",),
    "huggingface_hub": ("k3jax.eval",),
    "jax_triton": ("pallas_kernels",),
    "transformers": (),
    "torch": (),
    "tests": (),
}

# Row: package -> the only libraries it may import besides Python's own; absent rows are free.
ONLY = {
    "pallas_kernels": ("jax", "numpy", "chex", "jax_triton"),
    "k3jax.data": ("numpy", "grain", "tokenizers", "tiktoken", "pyarrow", "PIL", "fsspec"),
}

LAZY = (
    "jax_triton",
)  # fails to import on a CPU-only machine, so only inside the function using it


def within(name: str, prefixes) -> bool:
    """Whether the dotted `name` is one of `prefixes` or lies below one."""
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def module_name(path: str) -> str:
    """Dotted name of the module at `path`, relative to the root: k3jax/a/__init__.py -> k3jax.a."""
    parts = pathlib.PurePosixPath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: str, tree: ast.Module):
    """Yields (dotted name, line, whether inside a function) for each import, dynamic ones too."""
    module = module_name(path)
    package = module if path.endswith("__init__.py") else module.rpartition(".")[0]
    lazy = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            up = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*up, *filter(None, [node.module])]) if node.level else node.module
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func).rpartition(".")[2]
            names = [node.args[0].value] if called in ("import_module", "__import__") else []
        for name in names:
            yield name, node.lineno, id(node) in lazy


def check_imports(path: str, source: str) -> list[str]:
    """Returns one line per import in `source`, the module at `path`, that breaks a rule."""
    module = module_name(path)
    rows = [row for row in ARROWS if within(module, [row])]
    if not rows and module != "k3jax":
        return [f"{path}: {module} has no row in ARROWS; say there what it may import"]
    row = max(rows, key=len, default="k3jax")
    wrong = []
    for name, line, lazy in imported(path, ast.parse(source)):
        top = name.partition(".")[0]
        if top in PACKAGES:
            allowed = row in ARROWS and within(name, (row, *ARROWS[row]))
            rule = f"{row} may import {', '.join(ARROWS.get(row, ())) or 'nothing of ours'}"
        elif top in HOMES:
            allowed = within(module, HOMES[top]) and (lazy or top not in LAZY)
            place = ", ".join(HOMES[top]) or "no package"
            rule = f"{top} belongs in {place}{' inside a function' if top in LAZY else ''}"
        else:
            allowed = row not in ONLY or top in (*ONLY[row], *sys.stdlib_module_names)
            rule = f"{row} uses {', '.join(ONLY.get(row, ()))} and the standard library"
        if not allowed:
            wrong.append(f"{path}:{line}: imports {name}, but {rule}")
    return wrong


def sources() -> list[pathlib.Path]:
    """Every Python file of our packages."""
    return sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))


def test_every_import_in_the_repository_keeps_the_rules():
    wrong = []
    for file in sources():
        wrong += check_imports(file.relative_to(ROOT).as_posix(), file.read_text("utf-8"))
    assert sources(), f"no sources below {ROOT}"
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("pallas_kernels/kda/api.py", "from k3jax.parallel import mesh"),
        ("pallas_kernels/kda/api.py", "import flax.linen as nn"),
        ("pallas_kernels/kda/api.py", "import scipy"),
        ("pallas_kernels/kda/triton.py", "import jax_triton"),
        ("k3jax/layers/kda.py", "from k3jax.models.kimi_k3 import config"),
        ("k3jax/layers/kda.py", "from ..models import kimi_k3"),
        ("k3jax/layers/kda.py", "from .. import models"),
        ("k3jax/layers/kda.py", "import optax"),
        ("k3jax/models/kimi_k3/model.py", "from k3jax.train import step"),
        ("k3jax/models/kimi_k3/model.py", "import importlib\nimportlib.import_module('optax')"),
        ("k3jax/optim/muon.py", "from k3jax.parallel import mesh"),
        ("k3jax/optim/muon.py", "def f():\n    from k3jax.layers import kda"),
        ("k3jax/data/text.py", "import jax"),
        ("k3jax/train/step.py", "import flax"),
        ("k3jax/train/loop.py", "from orbax.checkpoint import v1"),
        ("k3jax/train/loop.py", "from configs import tiny"),
        ("k3jax/train/loop.py", "import tests.conftest"),
        ("k3jax/config.py", "from k3jax.models import kimi_k3"),
        ("k3jax/__init__.py", "from k3jax import models"),
        ("k3jax/new_room/a.py", "import jax"),
        ("configs/tiny.py", "from experiments import train"),
        ("benchmarks/kda.py", "from configs import tiny"),
        ("experiments/train.py", "import transformers"),
    ],
)
def test_an_import_against_the_rules_is_found(path, source):
    assert len(check_imports(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "pallas_kernels/kda/api.py",
            "import math\nimport jax\nfrom pallas_kernels import dispatch",
        ),
        ("pallas_kernels/kda/triton.py", "def f():\n    import jax_triton"),
        ("k3jax/layers/kda.py", "from flax import linen as nn\nfrom k3jax.parallel import specs"),
        ("k3jax/layers/kda.py", "from .norms import rms_norm"),
        ("k3jax/optim/muon.py", "import optax\nfrom k3jax.parallel.specs import BATCH"),
        ("k3jax/train/checkpoint.py", "from orbax.checkpoint import v1"),
        ("k3jax/train/loop.py", "from k3jax.data import packing\nfrom k3jax.layers import router"),
        ("experiments/train.py", "from absl import app\nfrom configs import tiny"),
    ],
)
def test_an_import_within_the_rules_passes(path, source):
    assert check_imports(path, source) == []
