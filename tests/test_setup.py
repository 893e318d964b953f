"""The scripts behind `make setup`: which Python they find, and when they rebuild.

Pretended interpreters are shell scripts, so no package is installed and nothing is downloaded.
"""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
VERSION = "{}.{}".format(*sys.version_info[:2])

# Stands for an interpreter of the version in its own path: answers the check with its path, tells
# its version, makes an environment that holds itself, and writes down what pip is asked for.
PRETENDED = """#!/bin/sh
case "$*" in
    *ensurepip*) [ "$4" = {version} ] && echo "$0" ;;
    *version_info*) echo {version} ;;
    *"-m venv"*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
    *"-m pip"*) echo "$*" >>pip-calls ;;
esac
"""
SHIM = "#!/bin/sh\necho 'pyenv: python: command not found' >&2\nexit 127\n"


def script(path: pathlib.Path, text: str) -> pathlib.Path:
    """Writes an executable file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def pretend(home: pathlib.Path, version: str) -> pathlib.Path:
    """Puts a pretended interpreter where pyenv would."""
    path = home / f".pyenv/versions/{version}.7/bin/python{version}"
    return script(path, PRETENDED.format(version=version))


def sh(name: str, *args, cwd=ROOT, home, path="", **env):
    """Runs a script of .ci/ with an environment of its own."""
    env = {"HOME": str(home), "PATH": f"{path}:/usr/bin:/bin", **env}
    command = ["sh", f".ci/{name}", *args]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "place",
    [
        ".pyenv/versions/3.99.1/bin",
        ".local/share/uv/python/cpython-3.99.1-linux-x86_64-gnu/bin",
        ".asdf/installs/python/3.99.1/bin",
        ".local/share/mise/installs/python/3.99.1/bin",
        "miniconda3/envs/work/bin",
        "miniforge3/bin",
    ],
)
def test_a_shim_that_fails_is_skipped_for_an_interpreter_that_runs(tmp_path, place):
    script(tmp_path / "shims/python3.99", SHIM)
    good = script(tmp_path / place / "python3.99", PRETENDED.format(version="3.99"))
    done = sh("find_python.sh", "3.99", home=tmp_path, path=tmp_path / "shims")
    assert (done.returncode, done.stdout.strip()) == (0, str(good)), done.stderr


def test_the_first_version_asked_for_wins_and_a_later_one_serves(tmp_path):
    old = pretend(tmp_path, "3.98")
    assert sh("find_python.sh", "3.99", "3.98", home=tmp_path).stdout.strip() == str(old)
    new = pretend(tmp_path, "3.99")
    assert sh("find_python.sh", "3.99", "3.98", home=tmp_path).stdout.strip() == str(new)


def test_no_python_ends_in_one_line_with_the_versions_and_the_way_out(tmp_path):
    done = sh("find_python.sh", "3.99", "3.98", home=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert all(word in done.stderr for word in ("3.99 3.98", "install", "PYTHON=/path"))


def test_the_interpreter_of_these_tests_passes_the_real_check(tmp_path):
    done = sh("find_python.sh", VERSION, home=tmp_path, PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    # An active environment must not be the base of the one that may replace it.
    in_environment = sys.prefix != sys.base_prefix
    assert not (in_environment and done.stdout.startswith(sys.prefix + os.sep))


@pytest.mark.parametrize(
    ("python", "says"),
    [
        (sys.executable, f"is Python {VERSION}, and the pinned packages are for: 3.99"),
        ("/nowhere/python", "does not run"),
    ],
)
def test_an_interpreter_named_in_vain_is_refused_in_one_line(tmp_path, python, says):
    done = sh("find_python.sh", "3.99", home=tmp_path, PYTHON=python)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert f"PYTHON={python} {says}" in done.stderr


@pytest.fixture
def project(tmp_path):
    """A copy of what setup.sh reads, beside a home with pretended interpreters."""
    shutil.copytree(ROOT / ".ci", tmp_path / "project/.ci")
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "project/pyproject.toml")
    for version in ("3.11", "3.13"):
        pretend(tmp_path / "home", version)
    return tmp_path / "project"


def setup(project, **env):
    """Runs setup.sh in a project; returns the finished process and how often pip was called."""
    (project / "pip-calls").write_text("")
    done = sh("setup.sh", cwd=project, home=project.parent / "home", path=_first(project), **env)
    return done, len((project / "pip-calls").read_text().splitlines())


def _first(project):
    # First on PATH, ahead of any interpreter that this machine has.
    return ":".join(str(p) for p in sorted((project.parent / "home").glob(".pyenv/versions/*/bin")))


def test_setup_takes_the_newest_python_and_does_nothing_the_second_time(project):
    done, calls = setup(project)
    assert done.returncode == 0 and calls == 3, done.stderr
    assert "stack b" in done.stdout and "Python 3.13" in done.stdout
    done, calls = setup(project)
    assert (done.returncode, done.stdout, calls) == (0, "", 0), done.stderr


def test_stack_a_is_python_311_in_a_folder_of_its_own(project):
    done, calls = setup(project, STACK="a")
    assert done.returncode == 0 and calls == 3, done.stderr
    assert "Python 3.11" in done.stdout
    assert (project / ".venv-a/bin/python").exists() and not (project / ".venv").exists()


@pytest.mark.parametrize("name", [".ci/constraints-b.txt", "pyproject.toml"])
def test_a_change_of_pins_or_dependencies_rebuilds_and_a_lint_setting_does_not(project, name):
    setup(project)
    pyproject = project / "pyproject.toml"
    pyproject.write_text(pyproject.read_text() + "\n[tool.other]\n")
    assert setup(project)[1] == 0
    (project / name).write_text("# a new first line\n" + (project / name).read_text())
    assert setup(project)[1] == 3


def test_a_copied_project_and_a_broken_interpreter_rebuild(project):
    setup(project)
    copy = project.with_name("copy")
    shutil.copytree(project, copy)
    assert setup(copy)[1] == 3
    script(project / ".venv/bin/python", SHIM)
    assert setup(project)[1] == 3


def test_extras_asked_for_once_stay(project):
    setup(project, EXTRAS="train,dev,serve")
    assert setup(project)[1] == 0
    done, calls = setup(project, EXTRAS="train,dev")
    assert calls == 3 and "extras train,dev:" in done.stdout


def test_an_environment_that_setup_did_not_make_is_left_alone(project):
    script(project / ".venv/bin/python", SHIM)
    done, calls = setup(project)
    assert (done.returncode, calls) == (1, 0)
    assert "move it away" in done.stderr and (project / ".venv/bin/python").exists()


def test_an_interrupted_setup_starts_again_and_a_running_one_is_not_disturbed(project):
    stamp = project / ".venv/k3jax-setup"
    script(stamp, f"building {os.getpid()}\nb\npython\ntrain,dev\n0\n")
    done, calls = setup(project)
    assert (done.returncode, calls) == (1, 0) and str(os.getpid()) in done.stderr
    ended = subprocess.Popen(["true"])
    ended.wait()
    script(stamp, f"building {ended.pid}\nb\npython\ntrain,dev\n0\n")
    assert setup(project)[1] == 3
