"""The main job: every mechanism of Kimi K3 at a size that two CPU cores train in ten minutes.

Command: make train
Hardware: 2 CPU cores, 6 GiB.
Time: 4.8 minutes from the first step to the last on 2 cores of an AMD EPYC with AVX-512,
  compilation, validation and samples included. An older or busy host needs about twice that.
Measured: 1.552 bits per byte of the validation text (Python 3.13; benchmarks/results). gzip -9 has
  1.593 of the same text concatenated, xz -9 1.631 per document and 1.374 concatenated. One seed;
  the settings were chosen by runs validated on this same text.
"""

from k3jax.data.config import DataConfig
from k3jax.layers.kda import KdaConfig
from k3jax.layers.latent_moe import MoeConfig
from k3jax.layers.mla import MlaConfig
from k3jax.models.kimi_k3.config import ModelConfig
from k3jax.optim.optimizer import OptimizerConfig
from k3jax.train.config import RunConfig, TrainConfig

MODEL = ModelConfig(
    vocab_size=8192,
    hidden_size=192,
    num_layers=5,
    mla_layers=(3, 4),
    kda=KdaConfig(heads=2, key_dim=64, value_dim=64, decay_rank=32),
    mla=MlaConfig(
        heads=2, q_lora_rank=96, kv_lora_rank=64, nope_dim=64, shared_dim=16, value_dim=64
    ),
    moe=MoeConfig(
        experts=16, top_k=2, expert_width=64, latent_dim=96, shared_experts=2, shared_width=48,
        histogram_bins=256,
    ),
    dense_width=256,
    attn_res_block=2,
    init_std=0.02,
    embedding_std=0.5,
    remat=False,
    unroll_layers=True,
)  # fmt: skip


def config() -> RunConfig:
    """Five layers (3 KDA, 2 latent attention), three frozen rows, 16 experts with 2 shared."""
    return RunConfig(
        model=MODEL,
        optimizer=OptimizerConfig(
            peak_lr=1.6e-2, min_lr_ratio=0.02, weight_decay=0.6, muon_momentum=0.85,
            muon_momentum_rule="ema", adamw_lr_multiplier=2.0,
        ),
        data=DataConfig(vocab_size=8192, sequence_length=128),
        train=TrainConfig(
            steps=460, batch_size=16, eval_batch_size=8, eval_sequence_length=1024,
            eval_batches=4, eval_every=230, sample_every=230,
        ),
    )  # fmt: skip
