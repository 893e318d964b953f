"""Kimi Delta Attention: projections, short convolutions, decay, output gate (§2.1.1, Eqs. 1-5)."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from k3jax.layers import initializers
from k3jax.layers.norms import gated_rms_norm
from k3jax.parallel import specs, tokens
from pallas_kernels.kda import check_chunk_size, check_lower_bound, kda, kda_decode
from pallas_kernels.precision import einsum
from pallas_kernels.short_conv import short_conv


@dataclasses.dataclass(frozen=True)
class KdaConfig:
    """Shape of the mixer.

    Attributes:
      heads: H.
      key_dim: K, width of queries, keys and decays.
      value_dim: V.
      conv_width: taps of the causal depthwise convolution; the last one meets the current token.
      decay_rank: rank of the decay projection; the head width in the released models.
      gate_lower_bound: log-decay lies in (bound, 0) by a scaled sigmoid; None is the unbounded
        softplus gate of Kimi-Linear, a different function.
      output_gate_rank: rank of the output gate; None is full rank.
      norm_eps: of the per-head output norm.
      chunk_size: 16, 32 or 64 tokens per chunk of the chunked form; None takes the
        implementation's choice.
      implementation: see `pallas_kernels.dispatch`.
    """

    heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 4
    decay_rank: int = 128
    gate_lower_bound: float | None = -5.0
    output_gate_rank: int | None = None
    norm_eps: float = 1e-5
    chunk_size: int | None = None
    implementation: str | None = None

    def __post_init__(self):
        for name in ("heads", "key_dim", "value_dim", "conv_width", "decay_rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"kda.{name}={getattr(self, name)}: must be at least 1; raise it")
        if self.output_gate_rank is not None and self.output_gate_rank < 1:
            raise ValueError(
                f"kda.output_gate_rank={self.output_gate_rank}: at least 1, or none for full rank"
            )
        try:
            check_chunk_size(self.chunk_size)
        except ValueError as error:
            raise ValueError(f"kda.{error}") from error
        try:
            check_lower_bound(self.gate_lower_bound)
        except ValueError as error:
            raise ValueError(f"kda.gate_{error}") from error


class KdaCache(NamedTuple):
    """What a sequence carries from token to token.

    Attributes:
      state: float32 [B, H, K, V].
      conv: last conv_width - 1 projected inputs of q, k, v before the convolution, oldest first,
        [B, conv_width - 1, H·(2K + V)].
    """

    state: jax.Array
    conv: jax.Array


class Streams(NamedTuple):
    """Projections that enter the recurrence; q, k, v before their convolutions."""

    q: jax.Array  # [B, T, H, K]
    k: jax.Array  # [B, T, H, K]
    v: jax.Array  # [B, T, H, V]
    g: jax.Array  # [B, T, H, K], raw decay logits without bias
    beta: jax.Array  # [B, T, H], float32


class Constants(NamedTuple):
    """Parameters used inside the recurrence, whole on every device."""

    conv: jax.Array  # [H·(2K + V), W]
    a_log: jax.Array  # [H]
    dt_bias: jax.Array  # [H, K]


def convolve(
    cfg: KdaConfig, streams: Streams, conv: jax.Array, **options: Any
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """One causal convolution with SiLU over the channels of q, k and v side by side.

    Args:
      cfg: shape.
      streams: of [B, T]; only q, k and v are read.
      conv: [H·(2K + V), W], channels in the order q, k, v.
      **options: segment ids and states, of `short_conv`.

    Returns:
      q and k [B, T, H, K], v [B, T, H, V] in the streams' dtype, and `short_conv`'s final state:
      [B, W - 1, H·(2K + V)], or None where none was asked for.
    """
    B, T = streams.beta.shape[:2]
    flat = [a.reshape(B, T, -1) for a in (streams.q, streams.k, streams.v)]
    out, state = short_conv(jnp.concatenate(flat, axis=-1), conv, activation="silu", **options)
    n = cfg.heads * cfg.key_dim
    q, k, v = out[..., :n], out[..., n : 2 * n], out[..., 2 * n :]
    shape = (B, T, cfg.heads)
    return q.reshape(*shape, -1), k.reshape(*shape, -1), v.reshape(*shape, -1), state


def recur(
    cfg: KdaConfig, streams: Streams, constants: Constants, segment_ids: jax.Array | None = None
) -> jax.Array:
    """Convolution and recurrence of whole packed rows; every document starts from zero.

    Args:
      cfg: shape.
      streams: of [B, T].
      constants: parameters.
      segment_ids: [B, T], 0 is padding; None is one document per row.

    Returns:
      [B, T, H, V] in v's dtype; 0 at padding.
    """
    q, k, v, _ = convolve(cfg, streams, constants.conv, segment_ids=segment_ids)
    return kda(
        q, k, v, streams.g, streams.beta, segment_ids=segment_ids, **_options(cfg, constants),
        chunk_size=cfg.chunk_size,
    )[0]  # fmt: skip


def prefill(
    cfg: KdaConfig,
    streams: Streams,
    constants: Constants,
    segment_ids: jax.Array,
    cache: KdaCache,
) -> tuple[jax.Array, KdaCache]:
    """Like `recur` for one document per row, continuing and updating a cache.

    Args:
      cfg: shape.
      streams: of [B, T].
      constants: parameters.
      segment_ids: [B, T], 1 at tokens and 0 at padding, which leaves the cache as it is.
      cache: what came before, zeros at the beginning.

    Returns:
      [B, T, H, V] in v's dtype, and the cache after each row's last token.
    """
    q, k, v, conv = convolve(
        cfg, streams, constants.conv,
        segment_ids=segment_ids, initial_state=cache.conv, return_final_state=True,
    )  # fmt: skip
    o, state = kda(
        q, k, v, streams.g, streams.beta,
        segment_ids=segment_ids, num_segments=1, initial_state=cache.state[:, None],
        return_final_state=True, chunk_size=cfg.chunk_size, **_options(cfg, constants),
    )  # fmt: skip
    return o, KdaCache(state[:, 0], conv)


def decode(
    cfg: KdaConfig, streams: Streams, constants: Constants, cache: KdaCache
) -> tuple[jax.Array, KdaCache]:
    """One token per sequence: the convolution's window and the fused recurrence step.

    Args:
      cfg: shape.
      streams: of [B, 1].
      constants: parameters.
      cache: what came before.

    Returns:
      [B, 1, H, V] in v's dtype, and the cache one token longer; equal to `prefill` up to rounding.

    Raises:
      ValueError: the streams hold more than one token.
    """
    length = streams.beta.shape[1]
    if length != 1:
        raise ValueError(
            f"{length} tokens in a decoding step of Kimi Delta Attention, which takes 1; feed one "
            "at a time, or pass segment_ids to continue the cache by several"
        )
    q, k, v, conv = convolve(
        cfg, streams, constants.conv, initial_state=cache.conv, return_final_state=True
    )
    slots = jnp.arange(q.shape[0], dtype=jnp.int32)
    o, state = kda_decode(
        q[:, 0], k[:, 0], v[:, 0], streams.g[:, 0], streams.beta[:, 0], cache.state, slots,
        **_options(cfg, constants),
    )  # fmt: skip
    return o[:, None], KdaCache(state, conv)


def _options(cfg: KdaConfig, constants: Constants) -> dict:
    return dict(
        a_log=constants.a_log, dt_bias=constants.dt_bias, lower_bound=cfg.gate_lower_bound,
        qk_l2norm=True, implementation=cfg.implementation,
    )  # fmt: skip


class KimiDeltaAttention(nn.Module):
    """The mixer. `x` and the result are [B, T, D].

    Decay, beta, state and output norm are float32; projections use x's dtype.
    """

    cfg: KdaConfig
    init_std: float | None = 0.02
    param_dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None, cache: KdaCache | None = None
    ) -> tuple[jax.Array, KdaCache | None]:
        """Mixes tokens of the same document.

        Args:
          x: [B, T, D].
          segment_ids: [B, T]; 0 is padding. With a cache: 1 marks the tokens that count.
          cache: None trains. With ids it is continued by T tokens, without by one, in a fused
            step.

        Returns:
          [B, T, D] in x's dtype, and the updated cache or None.

        Raises:
          ValueError: a cache, no ids and more than one token, or a mesh that splits the sequence.
        """
        tokens.refuse_split_sequence("Kimi Delta Attention")
        streams, constants = self._project(x)
        with_ids = () if segment_ids is None else (segment_ids,)
        if cache is None:
            run = tokens.per_device(recur, self.cfg, out_specs=specs.HEADS)
            o = run(streams, constants, *with_ids)
        else:
            out_specs = (specs.HEADS, KdaCache(specs.SEQUENCE_STATE, specs.SEQUENCE_CACHE))
            step = prefill if with_ids else decode
            # Caches do not vary over `context` while tokens do; it has length one here and no
            # gradient is taken, so the check of varying axes has nothing to protect.
            run = tokens.per_device(step, self.cfg, out_specs=out_specs, check_vma=False)
            o, cache = run(streams, constants, *with_ids, cache)
        return self._output(x, o), cache

    def _linear(self, name: str, shape: tuple[int, ...], spec) -> jax.Array:
        init = initializers.normal(self.init_std, spec, shape[0])
        return self.param(name, init, shape, self.param_dtype)

    def _heads(self, name: str, x: jax.Array, heads: int, width: int) -> jax.Array:
        w = self._linear(name, (x.shape[-1], heads, width), specs.IN_HEADS)
        return einsum("btd,dhk->bthk", x, w.astype(x.dtype))

    def _project(self, x: jax.Array) -> tuple[Streams, Constants]:
        c, d = self.cfg, x.shape[-1]
        H, K, V = c.heads, c.key_dim, c.value_dim
        w_f_a = self._linear("w_f_a", (d, c.decay_rank), specs.IN_MATRIX).astype(x.dtype)
        w_f_b = self._linear("w_f_b", (c.decay_rank, H, K), specs.IN_HEADS).astype(x.dtype)
        w_beta = self._linear("w_beta", (d, H), specs.IN_MATRIX).astype(x.dtype)
        low = einsum("btd,dr->btr", x, w_f_a)
        beta = jax.nn.sigmoid(einsum("btd,dh->bth", x, w_beta).astype(jnp.float32))
        streams = Streams(
            q=self._heads("w_q", x, H, K), k=self._heads("w_k", x, H, K),
            v=self._heads("w_v", x, H, V),
            g=einsum("btr,rhk->bthk", low, w_f_b), beta=beta,
        )  # fmt: skip
        taps = initializers.uniform(c.conv_width**-0.5, specs.CONVOLUTION)
        conv = [
            self.param(f"conv_{n}", taps, (H, width, c.conv_width), jnp.float32).reshape(
                H * width, c.conv_width
            )
            for n, width in (("q", K), ("k", K), ("v", V))
        ]
        zeros = initializers.constant(0.0, specs.VECTOR)
        dt_init = initializers.inverse_softplus_time_step(specs.PER_CHANNEL)
        return streams, Constants(
            conv=jnp.concatenate(conv, axis=0),
            a_log=self.param("a_log", zeros, (H,), jnp.float32),
            dt_bias=self.param("dt_bias", dt_init, (H, K), jnp.float32),
        )

    def _output(self, x: jax.Array, o: jax.Array) -> jax.Array:
        c, d = self.cfg, x.shape[-1]
        H, V = c.heads, c.value_dim
        if c.output_gate_rank is None:
            w_g = self._linear("w_g", (d, H, V), specs.IN_HEADS)
            gate = einsum("btd,dhv->bthv", x, w_g.astype(x.dtype))
        else:
            w_g_a = self._linear("w_g_a", (d, c.output_gate_rank), specs.IN_MATRIX)
            w_g_b = self._linear("w_g_b", (c.output_gate_rank, H, V), specs.IN_HEADS)
            low = einsum("btd,dr->btr", x, w_g_a.astype(x.dtype))
            gate = einsum("btr,rhv->bthv", low, w_g_b.astype(x.dtype))
        ones = initializers.constant(1.0, specs.VECTOR)
        o_norm = self.param("o_norm", ones, (V,), jnp.float32)
        normed = gated_rms_norm(o, o_norm, gate, c.norm_eps)
        into = initializers.normal(self.init_std, specs.OUT_HEADS, H * V)
        w_o = self.param("w_o", into, (H, V, d), self.param_dtype)
        return einsum("bthv,hvd->btd", normed, w_o.astype(x.dtype), out_sharding=specs.ACTIVATION)
