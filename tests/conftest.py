"""One process, eight CPU devices, a mesh of ones around every test, and the markers."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    ).strip()

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
