"""A public small Kimi K3: 1.02 billion parameters, 145 million active, for one large GPU.

The shape is that of a public training record (hidden 512, 12 layers, 256 experts, vocabulary
163,840, rows of 4096 tokens). Its optimizer was AdamW with a sign balancer; ours is the report's,
and our text is the standard library, whose tokenizer learns far fewer merges than the vocabulary
has ids.

Command: python experiments/train.py --config=configs/r1.py
Hardware: one GPU of 80 GB or more.
Time: not measured yet.
Measured: not measured yet. Counted: 1,023,600,228 parameters and balancing biases in all,
  145,008,228 active.
"""

from k3jax.data.config import DataConfig
from k3jax.layers.kda import KdaConfig
from k3jax.layers.latent_moe import MoeConfig
from k3jax.layers.mla import MlaConfig
from k3jax.models.kimi_k3.config import ModelConfig
from k3jax.optim.optimizer import OptimizerConfig
from k3jax.train.config import RunConfig, TrainConfig

MODEL = ModelConfig(
    vocab_size=163_840,
    hidden_size=512,
    num_layers=12,
    mla_layers=(3, 7, 11),
    kda=KdaConfig(heads=4, key_dim=128, value_dim=128, decay_rank=128),
    mla=MlaConfig(
        heads=8, q_lora_rank=192, kv_lora_rank=128, nope_dim=128, shared_dim=64, value_dim=128
    ),
    moe=MoeConfig(experts=256, top_k=6, expert_width=416, latent_dim=256, shared_experts=2),
    dense_width=2048,
    attn_res_block=4,
    tie_embeddings=True,
    compute_dtype="bfloat16",
)


def config() -> RunConfig:
    """The record's shape under the report's optimizer; rates, batch and length are ours."""
    return RunConfig(
        model=MODEL,
        optimizer=OptimizerConfig(peak_lr=1e-3),
        data=DataConfig(vocab_size=32_768, sequence_length=4096),
        train=TrainConfig(
            steps=2000, batch_size=16, micro_batches=2, eval_batch_size=8, eval_batches=4,
        ),
    )  # fmt: skip
