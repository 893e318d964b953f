"""A recall task on a three-layer model: the quickest end-to-end run after a change.

Command: python experiments/train.py --config=configs/debug.py
Hardware: 2 CPU cores.
Time: half a minute of steps, after half a minute of compilation.
Measured: recall loss 0.003 nats after 300 steps; guessing among the 32 values is ln 32 = 3.47.
"""

import dataclasses

from configs import tiny
from k3jax.data.config import DataConfig
from k3jax.layers.kda import KdaConfig
from k3jax.layers.latent_moe import MoeConfig
from k3jax.layers.mla import MlaConfig
from k3jax.optim.optimizer import OptimizerConfig
from k3jax.train.config import RunConfig, TrainConfig

MODEL = dataclasses.replace(
    tiny.MODEL,
    vocab_size=67,
    hidden_size=64,
    num_layers=3,
    mla_layers=(2,),
    kda=KdaConfig(heads=2, key_dim=16, value_dim=16, decay_rank=16),
    mla=MlaConfig(
        heads=2, q_lora_rank=None, kv_lora_rank=32, nope_dim=16, shared_dim=8, value_dim=16
    ),
    moe=MoeConfig(
        experts=16, top_k=2, expert_width=16, latent_dim=32, shared_experts=1, histogram_bins=64
    ),
    dense_width=64,
    attn_res_block=1,
    embedding_std=0.02,
)


def config() -> RunConfig:
    """Key-value pairs, then queries whose answers carry the loss."""
    return RunConfig(
        model=MODEL,
        optimizer=OptimizerConfig(peak_lr=1e-2),
        data=DataConfig(sequence_length=32),
        train=TrainConfig(
            steps=300, batch_size=64, eval_batch_size=64, task="recall", recall_pairs=4,
            sample_every=0, checkpoint_every=0,
        ),
    )  # fmt: skip
