"""Stable LatentMoE: full-width shared experts, routed experts in a latent space (Eq. 11)."""

import dataclasses
from collections.abc import Callable
from typing import get_args

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec

from k3jax.layers import initializers, router
from k3jax.layers.activations import ActivationConfig, gated
from k3jax.layers.feed_forward import FeedForward
from k3jax.layers.norms import rms_norm
from k3jax.parallel import specs, tokens
from pallas_kernels.grouped_matmul import expert_ffn
from pallas_kernels.precision import einsum


@dataclasses.dataclass(frozen=True)
class MoeConfig:
    """Shape of the layer.

    Attributes:
      experts: E.
      top_k: experts per token, k < E: Quantile Balancing needs one rejected expert.
      expert_width: F of a routed expert.
      latent_dim: width the routed experts work in; None is the model width (Kimi-Linear).
      latent_norm: RMS norm after the complete expert sum, before the up-projection.
      shared_experts: experts that see every token, stored as one layer of their summed width.
      shared_width: F of one shared expert; None is `expert_width`.
      scaling_factor: multiplies the routing weights.
      renormalize: divide the routing weights by their sum.
      balancing: what keeps the experts' loads equal. "quantile": Quantile Balancing by the exact
        order statistic over all tokens of the step (Eq. 14); their margins are gathered, 4·E bytes
        a token and layer on every device. "histogram": the same to within one bin, from counts
        (App. D), 4·E·bins bytes a layer. "sign": the bias moves by `balancing_rate` against the
        sign of the excess load. "aux_loss": no bias, but `aux_loss_weight` times the Switch loss
        is added to the training loss; with several micro-batches their loads take one more forward
        pass. "none": neither.
      histogram_bins: resolution of "histogram".
      balancing_ema: share of the old bias that both quantile rules keep at a step: an exponential
        average of the estimates; 0 is off.
      balancing_rate: step of "sign".
      aux_loss_weight: of "aux_loss".
      norm_eps: of the latent norm.
      implementation: of the grouped product, see `pallas_kernels.dispatch`.
    """

    experts: int
    top_k: int
    expert_width: int
    latent_dim: int | None = None
    latent_norm: bool = True
    shared_experts: int = 2
    shared_width: int | None = None
    scaling_factor: float = 1.0
    renormalize: bool = True
    balancing: router.Balancing = "histogram"
    histogram_bins: int = 1000
    balancing_ema: float = 0.0
    balancing_rate: float = 1e-3
    aux_loss_weight: float = 1e-2
    norm_eps: float = 1e-5
    implementation: str | None = None

    def __post_init__(self):
        if not 0 < self.top_k < self.experts:
            raise ValueError(
                f"moe.top_k={self.top_k} with moe.experts={self.experts}: one rejected expert is "
                "needed, so 0 < top_k < experts; a dense layer is model.dense_layers"
            )
        for name in ("expert_width", "shared_experts", "histogram_bins"):
            if getattr(self, name) < 1:
                raise ValueError(f"moe.{name}={getattr(self, name)}: must be at least 1; raise it")
        for name, absent in (("latent_dim", "the model width"), ("shared_width", "expert_width")):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"moe.{name}={value}: at least 1, or none for {absent}")
        self._check_balancing()
        if self.latent_norm and self.latent_dim is None:
            raise ValueError(
                "moe.latent_norm=true without moe.latent_dim: the norm belongs to the latent; "
                "set latent_norm=false or give latent_dim"
            )

    def _check_balancing(self):
        kinds = get_args(router.Balancing)
        if self.balancing not in kinds:
            raise ValueError(f"moe.balancing={self.balancing!r}: choose from {', '.join(kinds)}")
        if not 0 <= self.balancing_ema < 1:
            raise ValueError(
                f"moe.balancing_ema={self.balancing_ema}: a share in [0, 1); 0 for no average"
            )
        if self.balancing_ema and self.balancing not in ("quantile", "histogram"):
            raise ValueError(
                f"moe.balancing_ema={self.balancing_ema} with moe.balancing={self.balancing!r}: "
                "only quantile and histogram estimate what it averages; set it to 0"
            )
        for name in ("balancing_rate", "aux_loss_weight"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"moe.{name}={getattr(self, name)}: must be above 0; balancing=none for none"
                )

    @property
    def shared_total(self) -> int:
        """F of the one layer that all shared experts are stored as."""
        one = self.expert_width if self.shared_width is None else self.shared_width
        return self.shared_experts * one


def routed_experts(
    cfg: MoeConfig,
    act: Callable[[jax.Array, jax.Array], jax.Array],
    train: bool,
    x: jax.Array,
    z: jax.Array,
    valid: jax.Array,
    w_router: jax.Array,
    bias: jax.Array,
    w_gate_up: jax.Array,
    w_down: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, router.RouterStats | None]:
    """Σ_i p_i e_i(z) on one device's tokens, dropless; statistics summed over the mesh.

    Args:
      cfg: shape.
      act: gated activation.
      train: also count `RouterStats`.
      x: [B, T, D], what the router reads.
      z: [B, T, L], what the experts read.
      valid: [B, T] bool; padding reaches no expert and is never counted.
      w_router: [D, E].
      bias: [E].
      w_gate_up: [E, L, 2, F].
      w_down: [E, F, L].

    Returns:
      (u [B, T, L] float32, indices [B, T, k], weights [B, T, k], statistics or None without
      `train`).
    """
    B, T, D = x.shape
    options = dict(scaling_factor=cfg.scaling_factor, renormalize=cfg.renormalize)
    routing = router.route(x.reshape(B * T, D), w_router, bias, cfg.top_k, **options)
    u = expert_ffn(
        z.reshape(B * T, -1), routing.indices, routing.weights, w_gate_up, w_down,
        activation=act, token_mask=valid.reshape(-1), implementation=cfg.implementation,
    )  # fmt: skip
    shape = (B, T, cfg.top_k)
    out = (u.reshape(B, T, -1), routing.indices.reshape(shape), routing.weights.reshape(shape))
    if not train:
        return *out, None
    local = router.statistics(routing, bias, valid.reshape(-1), cfg.histogram_bins, cfg.balancing)
    return *out, _over_the_mesh(local, (B, T))


def _over_the_mesh(local: router.RouterStats, shape: tuple[int, int]) -> router.RouterStats:
    """Sums of counts and scores, 4·E·(bins + 1) bytes at most; margins stay with their tokens.

    Integer counts: their sum has the same bits on every mesh.
    """
    sums = {
        name: tokens.sum_over_tokens(getattr(local, name))
        for name in ("load", "histogram", "score_sum")
        if getattr(local, name) is not None
    }
    if local.required is not None:
        sums["required"] = local.required.reshape(*shape, -1)
    return local._replace(**sums)


class StableLatentMoE(nn.Module):
    """The layer. `x` and the result are [B, T, D]; the bias comes from outside the parameters."""

    cfg: MoeConfig
    activation: ActivationConfig
    init_std: float | None = 0.02
    param_dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(
        self, x: jax.Array, bias: jax.Array, valid: jax.Array, train: bool = False
    ) -> tuple[jax.Array, router.RouterStats | None]:
        """Sums the shared experts and, through the latent space, the chosen routed ones.

        Args:
          x: [B, T, D], normed.
          bias: [E] float32, the balancing bias; it chooses experts and weighs none.
          valid: [B, T] bool; padding gets the shared experts only and is not counted.
          train: count router statistics.

        Returns:
          [B, T, D] in x's dtype, and the statistics over all tokens of the mesh or None.
        """
        c, d = self.cfg, x.shape[-1]
        width = d if c.latent_dim is None else c.latent_dim
        z = x if c.latent_dim is None else self._linear("w_latent_down", x, width, specs.IN_MATRIX)
        w_router = self.param(
            "w_router", initializers.normal(self.init_std, specs.IN_MATRIX, d),
            (d, c.experts), jnp.float32,
        )  # fmt: skip
        w_gate_up, w_down = Experts(c, width, self.init_std, self.param_dtype, name="experts")()
        # All experts of the layer arrive on every device: E·3·L·F numbers in the compute dtype.
        weights = [tokens.whole(w) for w in (w_router, bias)]
        weights += [tokens.whole(w.astype(x.dtype)) for w in (w_gate_up, w_down)]
        counts = specs.REPLICATED
        if train:
            counts = router.RouterStats(*(counts,) * 4, specs.ACTIVATION, counts)
        out_specs = (*(specs.ACTIVATION,) * 3, counts)
        run = tokens.per_device(
            routed_experts, c, gated(self.activation), train, out_specs=out_specs
        )
        u, indices, p, stats = run(x, z, valid, *weights)
        self.sow("intermediates", "router_indices", indices)
        self.sow("intermediates", "router_weights", p)
        r = u.astype(x.dtype)
        if c.latent_norm:
            ones = initializers.constant(1.0, specs.VECTOR)
            latent_norm = self.param("latent_norm", ones, (width,), self.param_dtype)
            r = rms_norm(r, latent_norm, c.norm_eps)
        if c.latent_dim is not None:
            r = self._linear("w_latent_up", r, d, specs.OUT_MATRIX)
        shared = FeedForward(
            c.shared_total, self.activation, self.init_std, self.param_dtype, name="shared"
        )
        return r + shared(x), stats

    def _linear(self, name: str, x: jax.Array, width: int, spec: PartitionSpec) -> jax.Array:
        init = initializers.normal(self.init_std, spec, x.shape[-1])
        w = self.param(name, init, (x.shape[-1], width), self.param_dtype)
        return einsum("btd,de->bte", x, w.astype(x.dtype), out_sharding=specs.ACTIVATION)


class Experts(nn.Module):
    """Owner of the routed experts' matrices."""

    cfg: MoeConfig
    width: int
    init_std: float | None
    param_dtype: jnp.dtype

    @nn.compact
    def __call__(self) -> tuple[jax.Array, jax.Array]:
        c, L = self.cfg, self.width
        into = initializers.normal(self.init_std, specs.EXPERT_IN, L)
        back = initializers.normal(self.init_std, specs.EXPERT_OUT, c.expert_width)
        gate_up = self.param("w_gate_up", into, (c.experts, L, 2, c.expert_width), self.param_dtype)
        down = self.param("w_down", back, (c.experts, c.expert_width, L), self.param_dtype)
        return gate_up, down
