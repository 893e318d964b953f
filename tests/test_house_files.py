"""House rules of the repository as a whole: its tree, its words, its recipes and its tests."""

import ast
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]

REQUIRED = frozenset(
    "k3jax pallas_kernels configs experiments tests .ci "
    "WORKSPACE.md README.md LICENSE Makefile pyproject.toml".split()
)
OPTIONAL = frozenset({"benchmarks"})  # besides names that begin with a dot

# Pattern -> the rule. Written so that no pattern matches itself.
WORDS = {
    r"(?<![\w.})])/(?:work|tmp|root|home)\b": "a path of one machine; take it as an argument",
    r"\.\./(?:shared)": "a path outside the repository",
    r"\b(?:TO[D]O|FIX[M]E|XX[X])\b": "an unfinished mark; finish it or file an issue",
    r"(?i)\bthe spec[ ]file\b": "not a place that a reader has; name the paper's section",
}
TEXT = (".py", ".md", ".toml", ".txt", ".sh", ".json", ".yaml", ".yml")
EXEMPT = (".ci/find_python.sh",)  # it looks for Python where installers put it

RECIPE_LINES = ("Command:", "Hardware:", "Time:", "Measured:")
MIRRORED = ("k3jax", "pallas_kernels", "configs", "experiments", "benchmarks")


def tracked() -> list[str]:
    """Files that git has or would add, relative to the root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the repository's file list needs a git checkout: {done.stderr.strip()}")
    return sorted(name for name in done.stdout.split("\0") if name and (ROOT / name).is_file())


def check_tree(files: list[str]) -> list[str]:
    """The top level holds what the map in WORKSPACE.md lists, and nothing else."""
    found = {name.partition("/")[0] for name in files}
    extra = sorted(n for n in found - REQUIRED - OPTIONAL if not n.startswith("."))
    return [f"{name}: not a name for the top level" for name in extra] + [
        f"{name}: missing from the top level" for name in sorted(REQUIRED - found)
    ]


def check_words(path: str, text: str) -> list[str]:
    """Machine paths and unfinished marks."""
    lines = enumerate(text.splitlines(), start=1)
    return [
        f"{path}:{number}: {match.group()!r} is {rule}"
        for number, line in lines
        for pattern, rule in WORDS.items()
        for match in re.finditer(pattern, line)
    ]


def check_recipe(path: str, source: str) -> list[str]:
    """A recipe's docstring says how to run it, on what, for how long, and what came out."""
    lines = (ast.get_docstring(ast.parse(source)) or "").splitlines()
    return [
        f"{path}: the docstring lacks a line '{start} ...'"
        for start in RECIPE_LINES
        if not any(line.startswith(start) and line != start for line in lines)
    ]


def asserts(node: ast.AST, helpers: set[str]) -> bool:
    """Whether a node is an assertion, or calls one: assert*, check*, raises, warns, a helper."""
    if isinstance(node, ast.Assert):
        return True
    called = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
    return called.startswith(("assert", "check")) or called in {"raises", "warns", *helpers}


def check_tests(path: str, source: str) -> list[str]:
    """Every test asserts something, itself or through a helper of its file; its name says what."""
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
    helpers, known = set(), None
    while helpers != known:
        known = set(helpers)
        helpers = {f.name for f in functions if any(asserts(n, known) for n in ast.walk(f))}
    wrong = []
    for function in functions:
        at = f"{path}:{function.lineno}: {function.name}"
        if not function.name.startswith("test_"):
            continue
        if function.name not in helpers:
            wrong.append(f"{at} asserts nothing")
        if len(function.name.split("_")) < 4:
            wrong.append(f"{at} is not a sentence; say what must hold")
    return wrong


def check_mirror(files: list[str]) -> list[str]:
    """Tests lie where their package lies, under file names that occur once."""
    wrong, seen = [], {}
    folders = {str(pathlib.PurePosixPath(name).parent) for name in files}
    parents = {str(p) for f in folders for p in pathlib.PurePosixPath(f).parents} | folders
    for path in map(pathlib.PurePosixPath, files):
        if path.parts[0] != "tests" or not re.fullmatch(r"test_\w+\.py", path.name):
            continue
        mirrored = "/".join(path.parts[1:-1])
        if path.parts[1] in MIRRORED and mirrored not in parents:
            wrong.append(f"{path}: there is no folder {mirrored}/ that it could test")
        if path.name in seen:
            wrong.append(f"{path}: {seen[path.name]} has the same name, and pytest needs one")
        seen[path.name] = path
    return wrong


def read(names) -> dict[str, str]:
    """Relative path -> text."""
    return {name: (ROOT / name).read_text("utf-8") for name in names}


def test_the_top_level_is_the_tree_of_the_map():
    wrong = check_tree(tracked())
    assert not wrong, "\n".join(wrong)


def test_no_file_mentions_a_machine_or_unfinished_work():
    names = [n for n in tracked() if n.endswith(TEXT) or n in ("Makefile", ".ci/run")]
    texts = read(n for n in names if n not in EXEMPT)
    wrong = [line for path, text in texts.items() for line in check_words(path, text)]
    assert not wrong, "\n".join(wrong)


def test_every_recipe_says_command_hardware_time_and_measurement():
    names = [n for n in tracked() if n.startswith("configs/") and n.endswith(".py")]
    recipes = read(n for n in names if not n.endswith("__init__.py"))
    wrong = [line for path, text in recipes.items() for line in check_recipe(path, text)]
    assert recipes, "no recipe in configs/"
    assert not wrong, "\n".join(wrong)


def test_every_test_asserts_and_lies_beside_its_package():
    files = tracked()
    tests = read(n for n in files if re.fullmatch(r"tests/.*test_\w+\.py", n))
    wrong = [line for path, text in tests.items() for line in check_tests(path, text)]
    wrong += check_mirror(files)
    assert not wrong, "\n".join(wrong)


SLASH = "/"  # keeps the planted paths below from being found in this file
RECIPE = "'''Tiny.\n\nCommand: make train\nHardware: 2 cores\nTime: 8 min\nMeasured: 1.5\n'''"


@pytest.mark.parametrize("path", ["utils/a.py", "setup.cfg", "shared/b.md"])
def test_a_planted_top_level_name_is_found(path):
    files = [name + "/x" for name in REQUIRED]
    assert len(check_tree([*files, ".github/ci.yml", "benchmarks/x", path])) == 1
    assert len(check_tree(files[1:])) == 1


@pytest.mark.parametrize(
    "text",
    [
        f"load('{SLASH}work/data')",
        f"see {SLASH}tmp",
        f"HOME={SLASH}root/x",
        f"cd {SLASH}home/me",
        "open('.." + "/shared/x')",
        "# TO" + "DO: later",
        "# FIX" + "ME",
    ],
)
def test_a_planted_word_is_found(text):
    assert len(check_words("a.py", "x = 1\n" + text)) == 1
    assert check_words("a.py", "a/work, tests/tmp, {root}/home, the to-do list") == []


@pytest.mark.parametrize("line", RECIPE_LINES)
def test_a_recipe_without_one_of_the_lines_is_found(line):
    assert check_recipe("configs/tiny.py", RECIPE) == []
    assert len(check_recipe("configs/tiny.py", RECIPE.replace(line, "Note:"))) == 1
    assert len(check_recipe("configs/tiny.py", "x = 1")) == len(RECIPE_LINES)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def test_a_b_holds():\n    f()", 1),
        ("def test_a_b_holds():\n    x = 1 == 2", 1),
        ("def test_a():\n    assert f()", 1),
        ("def test_a_b_holds():\n    assert f()", 0),
        ("def test_a_b_holds():\n    with pytest.raises(ValueError):\n        f()", 0),
        ("def test_a_b_holds():\n    np.testing.assert_allclose(a, b)", 0),
        ("def helper():\n    f()", 0),
        ("def same():\n    assert f()\ndef test_a_b_holds():\n    same()", 0),
        ("def same():\n    f()\ndef test_a_b_holds():\n    same()", 1),
    ],
)
def test_a_test_that_asserts_nothing_is_found(source, found):
    assert len(check_tests("tests/test_a.py", source)) == found


def test_a_test_that_mirrors_nothing_or_repeats_a_name_is_found():
    good = ["k3jax/layers/kda.py", "tests/k3jax/layers/test_kda.py", "tests/test_imports.py"]
    assert check_mirror([*good, "tests/k3jax/test_config.py"]) == []
    assert len(check_mirror([*good, "tests/k3jax/nowhere/test_a.py"])) == 1
    assert len(check_mirror([*good, "tests/pallas_kernels/test_kda.py"])) == 2
