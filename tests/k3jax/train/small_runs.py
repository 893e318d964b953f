"""A model with every mechanism that compiles in seconds, and helpers on runs.

Dense KDA, KDA with experts, latent attention with experts; three rows of Attention Residuals.
"""

import dataclasses

import jax
import numpy as np

from k3jax.layers.kda import KdaConfig
from k3jax.layers.latent_moe import MoeConfig
from k3jax.layers.mla import MlaConfig
from k3jax.models.kimi_k3.config import ModelConfig

MODEL = ModelConfig(
    vocab_size=288,
    hidden_size=32,
    num_layers=3,
    mla_layers=(2,),
    kda=KdaConfig(heads=2, key_dim=16, value_dim=16, decay_rank=8),
    mla=MlaConfig(heads=2, q_lora_rank=16, kv_lora_rank=16, nope_dim=8, shared_dim=8, value_dim=16),
    moe=MoeConfig(
        experts=8, top_k=2, expert_width=16, latent_dim=16, shared_experts=1, histogram_bins=200
    ),
    dense_width=48,
    attn_res_block=1,
    init_std=None,
    embedding_std=1.0,
)

# The least that has both mixers, experts and a cache of each sort.
TWO_LAYERS = dataclasses.replace(MODEL, num_layers=2, mla_layers=(1,))


def with_train(cfg, **changes):
    """A run with fields of `train` replaced."""
    return dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, **changes))


def same_bits(a, b) -> bool:
    """Whether two trees hold the same arrays, bit for bit."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in pairs)


def packed(documents, length):
    """One row [1, length] of documents (id lists), each predicting its own next tokens."""
    row = {
        "tokens": np.zeros((1, length), np.int32),
        "targets": np.zeros((1, length), np.int32),
        "segment_ids": np.zeros((1, length), np.int32),
        "weights": np.zeros((1, length), np.float32),
    }
    start = 0
    for number, ids in enumerate(documents):
        end = start + len(ids)
        row["tokens"][0, start:end] = ids
        row["targets"][0, start : end - 1] = ids[1:]
        row["segment_ids"][0, start:end] = number + 1
        row["weights"][0, start : end - 1] = 1.0
        start = end
    return row


def largest_error(a, b) -> float:
    """Largest difference of two trees, each leaf relative to its largest entry (at least 1e-2)."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.max(np.abs(x - y)) / max(np.max(np.abs(x)), 1e-2)) for x, y in pairs)
