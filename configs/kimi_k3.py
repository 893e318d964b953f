"""The released model: 2.78 trillion parameters, 104 billion active.

Command: python -m pytest tests/test_lowering.py (traced on an abstract mesh only: neither
  compiled nor trained)
Hardware: none; every shape and sharding is computed on an abstract mesh of any size.
Time: under 2 minutes for the whole training step.
Measured: 2,779,484,476,000 text parameters and balancing biases, which is the released count less
  the 2,208 zeros that pad the decay rates of 69 layers.
"""

from k3jax.data.config import DataConfig
from k3jax.layers.activations import ActivationConfig
from k3jax.layers.kda import KdaConfig
from k3jax.layers.latent_moe import MoeConfig
from k3jax.layers.mla import MlaConfig
from k3jax.models.kimi_k3.config import ModelConfig
from k3jax.optim.optimizer import OptimizerConfig
from k3jax.train.config import RunConfig, TrainConfig

MODEL = ModelConfig(
    vocab_size=163_840,
    hidden_size=7168,
    num_layers=93,
    mla_layers=(*range(3, 92, 4), 92),
    kda=KdaConfig(heads=96, key_dim=128, value_dim=128, decay_rank=128, gate_lower_bound=-5.0),
    mla=MlaConfig(
        heads=96, q_lora_rank=1536, kv_lora_rank=512, nope_dim=128, shared_dim=64, value_dim=128
    ),
    moe=MoeConfig(experts=896, top_k=16, expert_width=3072, latent_dim=3584, shared_experts=2),
    dense_width=33_792,
    activation=ActivationConfig("situ", beta=4.0, linear_beta=25.0),
    attn_res_block=12,
    param_dtype="bfloat16",
    compute_dtype="bfloat16",
)


def config() -> RunConfig:
    """The released model under the report's optimizer.

    Weight decay, warm-up, cosine and the first context length are the report's, which goes on to
    64k, 256k and 1M tokens. Its learning rate, batch size and number of steps are not published;
    those below are ours. The threshold of QK-Clip, 100, is that of its predecessor K2.
    """
    return RunConfig(
        model=MODEL,
        optimizer=OptimizerConfig(peak_lr=2e-4, weight_decay=0.1, warmup_fraction=0.01),
        data=DataConfig(vocab_size=163_840, sequence_length=8192),
        train=TrainConfig(steps=100_000, batch_size=2048),
    )
