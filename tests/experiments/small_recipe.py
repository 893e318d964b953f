"""A recipe small enough to build in a test; its corpus is made by the test."""

from k3jax.data.config import DataConfig
from k3jax.layers.kda import KdaConfig
from k3jax.layers.latent_moe import MoeConfig
from k3jax.layers.mla import MlaConfig
from k3jax.models.kimi_k3.config import ModelConfig
from k3jax.optim.optimizer import OptimizerConfig
from k3jax.train.config import RunConfig, TrainConfig


def config() -> RunConfig:
    """Two layers of width 32: the model of the training tests, compiled once."""
    model = ModelConfig(
        vocab_size=288,
        hidden_size=32,
        num_layers=2,
        mla_layers=(1,),
        kda=KdaConfig(heads=2, key_dim=16, value_dim=16, decay_rank=8),
        mla=MlaConfig(
            heads=2, q_lora_rank=16, kv_lora_rank=16, nope_dim=8, shared_dim=8, value_dim=16
        ),
        moe=MoeConfig(
            experts=8, top_k=2, expert_width=16, latent_dim=16, shared_experts=1, histogram_bins=200
        ),
        dense_width=48,
        attn_res_block=1,
        init_std=None,
        embedding_std=1.0,
    )
    return RunConfig(
        model,
        OptimizerConfig(peak_lr=3e-3),
        DataConfig(vocab_size=288, sequence_length=32),
        TrainConfig(steps=2, batch_size=2, eval_batches=1, eval_batch_size=2, sample_tokens=4),
    )
