"""Golden checkpoints, loaded once for all tests of the models."""

import dataclasses
import os
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from k3jax.models.kimi_k3 import huggingface
from k3jax.models.kimi_k3.config import ModelConfig
from k3jax.parallel.mesh import make_mesh

FOLDER = pathlib.Path(os.environ.get("K3JAX_GOLDEN", pathlib.Path(__file__).parents[2] / "golden"))


class Golden(NamedTuple):
    """A reference checkpoint with the outputs the official code gives for it."""

    folder: pathlib.Path
    cfg: ModelConfig
    variables: dict
    expected: dict[str, np.ndarray]

    def tokens(self, name: str) -> jax.Array:
        """Expected integer input as a device array."""
        return jnp.asarray(self.expected[name])


def _load(name: str) -> Golden:
    folder = FOLDER / name
    with jax.set_mesh(make_mesh()):
        cfg, variables = huggingface.load(folder)
    cfg = dataclasses.replace(cfg, remat=False)  # no gradients here: half the program to compile
    return Golden(folder, cfg, variables, load_file(folder / "expected.safetensors"))


@pytest.fixture(scope="session")
def k3() -> Golden:
    """The tiny K3 of nine layers."""
    return _load("k3_tiny")


@pytest.fixture(scope="session")
def kimi_linear() -> Golden:
    """The tiny Kimi-Linear of five layers."""
    return _load("kimi_linear_tiny")


@pytest.fixture(scope="session", params=["k3_tiny", "kimi_linear_tiny"])
def golden(request) -> Golden:
    """Either of the two."""
    return _load(request.param)
