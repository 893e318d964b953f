"""A tiny model of every mechanism, and variables away from their symmetric starting point."""

import jax
import jax.numpy as jnp
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


@pytest.fixture(scope="session")
def draw():
    """Returns variables of a config with every parameter, zeros and ones included, perturbed."""

    def perturbed(cfg: ModelConfig, seed: int = 0) -> dict:
        variables = jax.jit(lambda key: model.init(cfg, key))(jax.random.key(seed))
        leaves, structure = jax.tree.flatten(variables)
        keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
        noisy = [a + 0.05 * jax.random.normal(k, a.shape) for k, a in zip(keys, leaves)]  # noqa: B905
        return jax.tree.unflatten(structure, [jnp.asarray(a) for a in noisy])

    return perturbed
