"""Kimi-Linear-48B-A3B, the published relative of Kimi K3: 49.1 billion parameters, 3.1 active.

The same code by configuration: softplus decay, SwiGLU, a low-rank output gate in KDA and none in
MLA, direct queries, experts of full width, plain residuals.

Command: python experiments/plan.py --config=configs/kimi_linear_48b.py --mesh=expert=8
Hardware: none for the plan; to train it, see what the plan says of memory.
Time: not measured yet.
Measured: not trained here. Counted: 49,122,681,728 parameters and balancing biases,
  3,106,972,544 active with the head, 3,484,459,904 with the input embedding too.
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
    hidden_size=2304,
    num_layers=27,
    mla_layers=(*range(3, 24, 4), 26),
    kda=KdaConfig(
        heads=32, key_dim=128, value_dim=128, decay_rank=128, gate_lower_bound=None,
        output_gate_rank=128,
    ),
    mla=MlaConfig(
        heads=32, q_lora_rank=None, kv_lora_rank=512, nope_dim=128, shared_dim=64, value_dim=128,
        output_gate=False,
    ),
    moe=MoeConfig(
        experts=256, top_k=8, expert_width=1024, latent_dim=None, latent_norm=False,
        shared_experts=1, scaling_factor=2.446,
    ),
    dense_width=9216,
    activation=ActivationConfig("swiglu"),
    attn_res_block=None,
    param_dtype="bfloat16",
    compute_dtype="bfloat16",
)  # fmt: skip


def config() -> RunConfig:
    """The published model. Its report gives peak rate, context and batch (32 M tokens).

    It trained with warm-up, a constant rate and a final decay, and with QK-Clip, as here. The
    lengths of warm-up and decay, the threshold and the number of steps are ours.
    """
    return RunConfig(
        model=MODEL,
        optimizer=OptimizerConfig(peak_lr=1.1e-3, schedule="wsd"),
        data=DataConfig(vocab_size=163_840, sequence_length=4096),
        train=TrainConfig(steps=43_000, batch_size=8192, micro_batches=8),
    )
