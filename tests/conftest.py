"""One process, eight CPU devices, a mesh of ones around every test, and the markers."""

import ctypes
import os

from k3jax.parallel.host import ONE_PRODUCT_PER_CALL, set_xla_flags

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Eight devices for mesh tests. Nearly all test time is compilation of small programs, so code is
# generated without optimisation; `make test` on one machine is half as long and as strict.
set_xla_flags(
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    ONE_PRODUCT_PER_CALL,
)

# glibc fills new memory with bytes that read as 8e37: whatever reads what was never written, as a
# fused product of XLA's CPU backend has done, fails a test instead of passing by luck.
if hasattr(ctypes.CDLL(None), "mallopt"):
    ctypes.CDLL(None).mallopt(-6, 129)  # M_PERTURB

import jax
import numpy as np
import pytest

from k3jax.parallel.mesh import AXES

# Test files that use the same compiled functions; each list runs in one process. The rest stays
# together by file. Lists come first: a long one at the end would leave the other process idle.
TOGETHER = {
    "steps": [
        "train/test_step",
        "train/test_loop",
        "train/test_crash_safety",
        "train/test_text_runs",
        "train/test_packing_whole_model",
    ],
    "models": ["models/test_model", "layers/test_attention_residuals"],
    "golden": ["models/test_golden"],
    "kda": ["kda/test_kda_chunked", "kda/test_kda_states", "kda/test_kda_documents"],
    "generation": [
        "models/test_generate",
        "experiments/test_use_scripts",
        "experiments/test_evaluate",
    ],
    "evaluation": [
        "eval/test_score",
        "eval/test_perplexity",
        "eval/test_needle",
        "eval/test_text_model",
        "eval/test_suite",
        "eval/test_harness",
    ],
}


@pytest.hookimpl(optionalhook=True)  # without xdist there is one process and nothing to share out
def pytest_xdist_make_scheduler(config, log):
    """Gives each process whole groups: a list of `TOGETHER`, or a file."""
    from xdist.scheduler import LoadFileScheduling

    class LoadGroups(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return group_of(super()._split_scope(nodeid))

    config.option.loadscopereorder = False  # keep the order below, not that of most tests first
    return LoadGroups(config, log)


def pytest_collection_modifyitems(items):
    """Puts the groups of `TOGETHER` first, in its order."""
    order = {name: place for place, name in enumerate(TOGETHER)}
    items.sort(key=lambda item: order.get(group_of(item.path.as_posix()), len(order)))


def group_of(file):
    """Name of the group of a test file."""
    for name, files in TOGETHER.items():
        if file.removesuffix(".py").endswith(tuple(files)):
            return name
    return file


@pytest.fixture(scope="session", autouse=True)
def mesh():
    """The always-explicit mesh, every axis of length one, in force for every test and fixture."""
    one = jax.make_mesh((1, 1, 1, 1), AXES, devices=jax.devices()[:1])
    with jax.set_mesh(one):
        yield one


@pytest.fixture
def rng():
    """A numpy generator with a fixed seed; every test that draws uses its own."""
    return np.random.default_rng(0)
