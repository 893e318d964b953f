"""The least model that has every mechanism, and helpers on runs.

Dense KDA and latent attention with experts: both mixers, a cache of each sort, and two rows of
Attention Residuals.
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
    num_layers=2,
    mla_layers=(1,),
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

# With a KDA layer that has experts.
THREE_LAYERS = dataclasses.replace(MODEL, num_layers=3, mla_layers=(2,))


def with_train(cfg, **changes):
    """A run with fields of `train` replaced."""
    return dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, **changes))


def same_bits(a, b) -> bool:
    """Whether two trees have one structure and hold the same arrays, bit for bit."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    equal = all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in pairs)
    return equal and jax.tree.structure(a) == jax.tree.structure(b)


ROWS, LENGTH = 4, 64  # one shape for all batches: one compilation of each function


def packed(*rows):
    """A batch [ROWS, LENGTH] of rows of documents (id lists); what is not given is padding."""
    shape = (ROWS, LENGTH)
    batch = {n: np.zeros(shape, np.int32) for n in ("tokens", "targets", "segment_ids")}
    batch["weights"] = np.zeros(shape, np.float32)
    for row, documents in enumerate(rows):
        start = 0
        for number, ids in enumerate(documents):
            end = start + len(ids)
            batch["tokens"][row, start:end] = ids
            batch["targets"][row, start : end - 1] = ids[1:]
            batch["segment_ids"][row, start:end] = number + 1
            batch["weights"][row, start : end - 1] = 1.0
            start = end
    return batch


def largest_error(a, b) -> float:
    """Largest difference of two trees, each leaf relative to its largest entry (at least 1e-2)."""
    # On the host: momenta live elsewhere on the mesh than the parameters they belong to.
    pairs = zip(*(jax.tree.leaves(jax.device_get(tree)) for tree in (a, b)), strict=True)
    return max(float(np.max(np.abs(x - y)) / max(np.max(np.abs(x)), 1e-2)) for x, y in pairs)
