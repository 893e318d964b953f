"""A tiny model of every mechanism, and variables away from their symmetric starting point."""

import jax
import numpy as np
import pytest

from k3jax.layers.kda import KdaConfig
from k3jax.layers.latent_moe import MoeConfig
from k3jax.layers.mla import MlaConfig
from k3jax.models.kimi_k3 import model
from k3jax.models.kimi_k3.config import ModelConfig


@pytest.fixture(scope="session")
def tiny_config() -> ModelConfig:
    """Five layers, every mechanism, nothing square: widths differ so that a transpose shows."""
    return ModelConfig(
        vocab_size=64,
        hidden_size=48,
        num_layers=5,
        mla_layers=(3, 4),
        kda=KdaConfig(heads=2, key_dim=16, value_dim=20, decay_rank=12),
        mla=MlaConfig(
            heads=3, q_lora_rank=28, kv_lora_rank=24, nope_dim=12, shared_dim=8, value_dim=10
        ),
        moe=MoeConfig(
            experts=8, top_k=2, expert_width=22, latent_dim=36, shared_experts=2, histogram_bins=64
        ),
        dense_width=56,
        attn_res_block=2,
        init_std=None,
        remat=False,
    )


def fill(target, seed: int = 0):
    """Values for abstract variables: norms near 1, everything else of unit output scale.

    Drawn by numpy into the shapes and shardings of the target, which needs no compilation.
    """
    rng = np.random.default_rng(seed)

    def value(path, leaf):
        name = path[-1].key
        noise = rng.normal(size=leaf.shape)
        if name.endswith("norm"):
            noise = 1.0 + 0.1 * noise
        elif name == "dt_bias":
            noise = noise - 3.0
        elif name in ("bias", "a_log"):
            noise = 0.1 * noise
        else:
            noise = noise * leaf.shape[-1] ** -0.5
        mesh = jax.sharding.get_mesh()
        place = jax.sharding.NamedSharding(mesh, leaf.sharding.spec)
        return jax.device_put(noise.astype(leaf.dtype), place)

    return jax.tree_util.tree_map_with_path(value, target)


@pytest.fixture(scope="session")
def draw():
    """Returns a model's variables away from their symmetric start, where queries are zero."""

    def drawn(cfg: ModelConfig, seed: int = 0) -> dict:
        return fill(jax.eval_shape(lambda key: model.init(cfg, key), jax.random.key(0)), seed)

    return drawn


@pytest.fixture(scope="session")
def draw_layer():
    """Returns one module's parameters, given the arguments of its call."""
    return lambda net, *args: fill(
        jax.eval_shape(lambda key: net.init(key, *args), jax.random.key(0))
    )
