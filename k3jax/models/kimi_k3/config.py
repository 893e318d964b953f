"""The whole text model's configuration, composed of the layers' own."""

import dataclasses
from typing import Literal

import jax.numpy as jnp

from k3jax.layers.activations import ActivationConfig
from k3jax.layers.kda import KdaConfig
from k3jax.layers.latent_moe import MoeConfig
from k3jax.layers.mla import MlaConfig

_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Kimi K3, or Kimi-Linear by configuration.

    Attributes:
      vocab_size: V.
      hidden_size: D.
      num_layers: transformer layers, two sublayers each.
      mla_layers: 0-based layers that mix by latent attention; all others are KDA.
      dense_layers: the first so many layers have a dense feed-forward, the rest experts.
      dense_width: F of the dense feed-forward.
      kda, mla, moe, activation: the layers.
      attn_res_block: transformer layers per frozen row of Attention Residuals; "full" makes every
        sublayer's output a source of its own, with memory and reads that grow with depth; None is
        the plain residual stream.
      mtp_layers: 0, or 1 for a multi-token-prediction layer behind the last one: trained to guess
        the token after the next one, ignored by evaluation and generation. The report's model has
        one, the released weights none.
      mtp_loss_weight: factor of its mean loss beside the main one. Unconfirmed: the report gives
        none; 0.3 is what others use.
      norm_eps: of the layer norms, the final norm and the depth mixtures.
      tie_embeddings: the head is the transposed embedding.
      init_std: standard deviation of linear maps; None is fan_in^-1/2.
      embedding_std: standard deviation of the embedding table.
      param_dtype: stored parameters; gates, router, norms of the KDA output are float32 always.
      compute_dtype: activations and matrix products. Router, decay, beta, state, softmax, depth
        mixing, expert sum, norms and cross-entropy are float32 islands in either case.
      remat: recompute each layer in the backward pass instead of keeping its activations.
      unroll_layers: lay repeated groups out in the program instead of looping over them: faster
        for a few layers, slower to compile for many.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    mla_layers: tuple[int, ...]
    kda: KdaConfig
    mla: MlaConfig
    moe: MoeConfig
    dense_width: int
    dense_layers: int = 1
    activation: ActivationConfig = ActivationConfig()
    attn_res_block: int | Literal["full"] | None = 12
    mtp_layers: int = 0
    mtp_loss_weight: float = 0.3
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    init_std: float | None = 0.02
    embedding_std: float = 0.02
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    remat: bool = True
    unroll_layers: bool = False

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "num_layers", "dense_width"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"model.{name}={getattr(self, name)}: must be at least 1; raise it"
                )
        outside = [i for i in self.mla_layers if not 0 <= i < self.num_layers]
        if outside or list(self.mla_layers) != sorted(set(self.mla_layers)):
            raise ValueError(
                f"model.mla_layers={self.mla_layers}: 0-based, ascending, each below "
                f"num_layers={self.num_layers}; published lists are 1-based, subtract 1"
            )
        if not 0 <= self.dense_layers <= self.num_layers:
            raise ValueError(
                f"model.dense_layers={self.dense_layers}: between 0 and num_layers="
                f"{self.num_layers}; 0 gives every layer experts, 1 is as released"
            )
        block = self.attn_res_block
        if block not in (None, "full") and (not isinstance(block, int) or block < 1):
            raise ValueError(
                f"model.attn_res_block={block!r}: at least 1, full for every sublayer, or none for "
                "plain residuals"
            )
        if self.mtp_layers not in (0, 1):
            raise ValueError(
                f"model.mtp_layers={self.mtp_layers}: 0 or 1; the report's model has one"
            )
        if not 0 < self.mtp_loss_weight < float("inf"):
            raise ValueError(
                f"model.mtp_loss_weight={self.mtp_loss_weight}: above 0 and finite; mtp_layers=0 "
                "turns the layer off"
            )
        for name in ("param_dtype", "compute_dtype"):
            if getattr(self, name) not in _DTYPES:
                raise ValueError(
                    f"model.{name}={getattr(self, name)!r}: choose from {', '.join(_DTYPES)}"
                )

    @property
    def moe_layers(self) -> int:
        """Number of layers with experts."""
        return self.num_layers - self.dense_layers

    @property
    def param_type(self) -> jnp.dtype:
        """`param_dtype` as a dtype."""
        return _DTYPES[self.param_dtype]

    @property
    def compute_type(self) -> jnp.dtype:
        """`compute_dtype` as a dtype."""
        return _DTYPES[self.compute_dtype]
