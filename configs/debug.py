"""A recall task on a three-layer model: the quickest end-to-end run after a change.

Command: python experiments/train.py --config=configs/debug.py
Hardware: 1 CPU core.
Time: about 20 s of steps on a busy machine, after half a minute of compilation.
Measured: the loss only reaches the entropy of the values (ln 256 = 5.55) in these 200 steps; a
  recipe that solves the recall is still to be found.
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
    vocab_size=512,
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
)


def config() -> RunConfig:
    """Key-value pairs, then queries whose answers carry the loss."""
    return RunConfig(
        model=MODEL,
        optimizer=OptimizerConfig(peak_lr=1e-2),
        data=DataConfig(vocab_size=512, sequence_length=64),
        train=TrainConfig(
            steps=200, batch_size=16, task="recall", sample_every=0, checkpoint_every=0
        ),
    )
