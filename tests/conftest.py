"""One process, eight CPU devices, a mesh of ones around every test, and the markers."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Eight devices for mesh tests. Nearly all test time is compilation of small programs, so code is
# generated without optimisation; `make test` on one machine is half as long and as strict.
for flag in ("--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"):
    if flag.split("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()

import jax
import numpy as np
import pytest

AXES = ("stage", "data", "expert", "context")


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
