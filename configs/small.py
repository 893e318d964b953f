"""Kimi K3 in proportion at 100 million parameters: a model for one GPU.

Command: python experiments/train.py --config=configs/small.py
Hardware: one GPU with 24 GB.
Time: not measured yet.
Measured: not measured yet.
"""

from k3jax.data.config import DataConfig
from k3jax.layers.kda import KdaConfig
from k3jax.layers.latent_moe import MoeConfig
from k3jax.layers.mla import MlaConfig
from k3jax.models.kimi_k3.config import ModelConfig
from k3jax.optim.optimizer import OptimizerConfig
from k3jax.train.config import RunConfig, TrainConfig

MODEL = ModelConfig(
    vocab_size=16_384,
    hidden_size=512,
    num_layers=9,
    mla_layers=(3, 7, 8),
    kda=KdaConfig(heads=6, key_dim=128, value_dim=128, decay_rank=128),
    mla=MlaConfig(
        heads=6, q_lora_rank=128, kv_lora_rank=64, nope_dim=128, shared_dim=64, value_dim=128
    ),
    moe=MoeConfig(experts=64, top_k=4, expert_width=160, latent_dim=256, shared_experts=2),
    dense_width=2304,
    attn_res_block=4,
    compute_dtype="bfloat16",
)


def config() -> RunConfig:
    """Nine layers (6 KDA, 3 latent attention), three frozen rows, 64 experts with 2 shared."""
    return RunConfig(
        model=MODEL,
        optimizer=OptimizerConfig(peak_lr=3e-3),
        data=DataConfig(vocab_size=16_384, sequence_length=1024),
        train=TrainConfig(steps=1000, batch_size=32, eval_batches=8, eval_batch_size=8),
    )
