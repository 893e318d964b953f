"""The stack: blocks in a Python loop, equal groups in a scan, layers inside (§2, §2.2).

With Attention Residuals the running prefix restarts at every block and the frozen rows are the
bank; in their full form the prefix is the newest sublayer's output and the bank holds all before
it; without them the prefix is the ordinary residual stream. All three share this code.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from k3jax.layers import initializers
from k3jax.layers.attention_residuals import DepthMixture
from k3jax.layers.feed_forward import FeedForward
from k3jax.layers.kda import KdaCache, KimiDeltaAttention
from k3jax.layers.latent_moe import StableLatentMoE
from k3jax.layers.mla import LatentAttention, MlaCache
from k3jax.layers.norms import rms_norm
from k3jax.layers.router import RouterStats
from k3jax.models.kimi_k3 import depth
from k3jax.models.kimi_k3.config import ModelConfig
from k3jax.parallel import specs


class Context(NamedTuple):
    """What every layer reads, the same for all.

    Attributes:
      segment_ids: [B, T] or None (one document per row; with a cache: a decoding step).
      valid: [B, T] bool.
      lengths: [B] cache rows in use, or None without a cache.
    """

    segment_ids: jax.Array | None
    valid: jax.Array
    lengths: jax.Array | None


class PerLayer(NamedTuple):
    """What differs by layer; leading axes [repeats, layers of that sort in a group].

    Attributes:
      bias: router bias [.., E].
      kda: caches or None.
      mla: caches or None.
    """

    bias: jax.Array
    kda: KdaCache | None
    mla: MlaCache | None


class Outputs(NamedTuple):
    """What layers give back besides the stream, laid out as in `PerLayer`.

    `source` is a single layer's mixer output [B, T, D] where Attention Residuals are full: the row
    of the bank that the prefix, the feed-forward's output, does not hold.
    """

    stats: RouterStats | None
    max_logits: jax.Array | None
    kda: KdaCache | None
    mla: MlaCache | None
    source: jax.Array | None = None


class Modes(NamedTuple):
    """Static switches of one call."""

    train: bool = False
    max_logits: bool = False


class Layer(nn.Module):
    """One transformer layer: a mixer and a feed-forward, each reading a mixture over depth."""

    cfg: ModelConfig
    kind: depth.LayerKind
    modes: Modes

    @nn.compact
    def __call__(self, prefix, bank, at_block_start, context: Context, own: PerLayer):
        """Returns the new prefix [B, T, D] and this layer's `Outputs`.

        Args:
          prefix: running sum, [B, T, D]; zeros at the start of a block. In the full form the
            newest source.
          bank: frozen rows; empty without Attention Residuals.
          at_block_start: scalar bool, the prefix holds no sublayer yet.
          context: shared by all layers.
          own: this layer's router bias and caches.
        """
        c = self.cfg
        a = self._read("mixer_res", bank, prefix, at_block_start)
        self.sow("intermediates", "attn_input", a)
        u, kda_cache, mla_cache, top = self._mix(self._norm("input_norm", a), context, own)
        self.sow("intermediates", "mixer_output", u)
        full = c.attn_res_block == "full"
        bank, prefix = ((*bank, prefix), u) if full else (bank, prefix + u)
        m = self._read("ffn_res", bank, prefix, False)
        self.sow("intermediates", "mlp_input", m)
        x = self._norm("post_norm", m)
        sizes = dict(init_std=c.init_std, param_dtype=c.param_type)
        stats = None
        if self.kind.ffn == "dense":
            f = FeedForward(c.dense_width, c.activation, name="ffn", **sizes)(x)
        else:
            moe = StableLatentMoE(c.moe, c.activation, name="ffn", **sizes)
            f, stats = moe(x, own.bias, context.valid, train=self.modes.train)
        self.sow("intermediates", "ffn_output", f)
        prefix = f if full else prefix + f
        self.sow("intermediates", "prefix", prefix)
        return prefix, Outputs(stats, top, kda_cache, mla_cache, u if full else None)

    def _read(self, name: str, bank, prefix, is_empty):
        if self.cfg.attn_res_block is None:
            return prefix
        site = DepthMixture(self.cfg.norm_eps, self.cfg.param_type, name=name)
        return site(bank, prefix, is_empty)

    def _norm(self, name: str, x: jax.Array) -> jax.Array:
        ones = initializers.constant(1.0, specs.VECTOR)
        weight = self.param(name, ones, (x.shape[-1],), self.cfg.param_type)
        return rms_norm(x, weight, self.cfg.norm_eps)

    def _mix(self, x: jax.Array, context: Context, own: PerLayer):
        c = self.cfg
        sizes = dict(init_std=c.init_std, param_dtype=c.param_type, name="mixer")
        if self.kind.mixer == "kda":
            u, cache = KimiDeltaAttention(c.kda, **sizes)(x, context.segment_ids, own.kda)
            return u, cache, None, None
        u, cache, top = LatentAttention(c.mla, **sizes)(
            x, context.segment_ids, own.mla, context.lengths, max_logits=self.modes.max_logits
        )
        return u, None, cache, top


def _take(tree, n: int):
    return jax.tree.map(lambda a: a[n], tree)


class LayerGroup(nn.Module):
    """A run of layers that the backbone repeats; the body of the scan."""

    cfg: ModelConfig
    kinds: tuple[depth.LayerKind, ...]
    modes: Modes

    @nn.compact
    def __call__(self, prefix, scanned, bank, context: Context):
        """Carry: the prefix. Scanned: (is this the block's first group, `PerLayer`)."""
        is_first, own = scanned
        # With `prevent_cse`: without a loop around it (unrolled, or a group that stands once) XLA
        # would find the recomputed layer equal to the first one and keep everything after all.
        layer_type = nn.remat(Layer, prevent_cse=True) if self.cfg.remat else Layer
        outputs, seen = [], {"kda": 0, "mla": 0, "moe": 0, "dense": 0}
        for i, kind in enumerate(self.kinds):
            mine = PerLayer(
                bias=_take(own.bias, seen["moe"]) if kind.ffn == "moe" else own.bias[:0],
                kda=_take(own.kda, seen["kda"]) if kind.mixer == "kda" else None,
                mla=_take(own.mla, seen["mla"]) if kind.mixer == "mla" else None,
            )
            layer = layer_type(self.cfg, kind, self.modes, name=f"layer_{i}")
            at_start = is_first if i == 0 else jnp.zeros_like(is_first)
            prefix, out = layer(prefix, bank, at_start, context, mine)
            outputs.append(out)
            seen[kind.mixer] += 1
            seen[kind.ffn] += 1
        return prefix, Outputs(*(_stack(field) for field in zip(*outputs, strict=True)))


class Backbone(nn.Module):
    """All layers. Router biases live in the `router` collection, one row per MoE layer.

    The row of a multi-token-prediction layer is the last one; the stack itself leaves it alone.
    """

    cfg: ModelConfig
    modes: Modes = Modes()

    @nn.compact
    def __call__(self, x: jax.Array, context: Context, caches=(None, None)):
        """Runs the stack.

        Args:
          x: embedded tokens, [B, T, D].
          context: see `Context`.
          caches: (KdaCache, MlaCache) with a leading axis over all layers of that sort, or Nones.

        Returns:
          The last mixture over depth [B, T, D], `Outputs` with leading axes over all layers of
          each sort, and the router biases [mtp_layers, E] of layers behind the stack.
        """
        c = self.cfg
        shape = (c.moe_layers + c.mtp_layers, c.moe.experts)
        bias = self.variable(
            "router", "bias",
            lambda: jnp.zeros(shape, jnp.float32, out_sharding=specs.ROUTER_BIAS),
        ).value  # fmt: skip
        bank: tuple[jax.Array, ...] = ()
        prefix, outputs, used = x, [], {"kda": 0, "mla": 0, "moe": 0}
        for b, groups in enumerate(depth.blocks(c)):
            if c.attn_res_block not in (None, "full"):
                # Opaque, or XLA computes the scores of these zeros while compiling, for seconds.
                empty = jax.lax.optimization_barrier(jnp.zeros_like(prefix))
                bank, prefix = (*bank, prefix), empty
            block = Block(c, tuple(groups), self.modes, name=f"block_{b}")
            before = prefix
            prefix, out = block(prefix, bank, context, bias, caches, used)
            if c.attn_res_block == "full":
                bank = (*bank, before, out[0].source)
            outputs += [o._replace(source=None) for o in out]
        if c.attn_res_block is not None:
            site = DepthMixture(c.norm_eps, c.param_type, name="output_res")
            prefix = site(bank, prefix, False)
        return prefix, concatenate(outputs), bias[c.moe_layers :]


class Block(nn.Module):
    """The groups between two frozen rows."""

    cfg: ModelConfig
    groups: tuple[depth.Group, ...]
    modes: Modes

    @nn.compact
    def __call__(self, prefix, bank, context, bias, caches, used: dict[str, int]):
        """Runs the groups one after another.

        Args:
          prefix: running sum, [B, T, D]; zeros in the block form of Attention Residuals, the newest
            sublayer's output in the full form.
          bank: frozen rows, [B, T, D] each; empty without Attention Residuals.
          context: shared by all layers.
          bias: router biases of the whole stack, [L_moe, E]; rows behind them are not read.
          caches: as in `Backbone`, of the whole stack.
          used: layers of each sort ("kda", "mla", "moe") before this block; counted on in place.

        Returns:
          The new prefix, and one `Outputs` per group with leading axes over its layers of each
          sort.
        """
        outputs = []
        for g, group in enumerate(self.groups):
            sources = {"moe": bias, "kda": caches[0], "mla": caches[1]}
            own = PerLayer(*(_slice(sources[s], group, s, used) for s in ("moe", "kda", "mla")))
            opens = g == 0 and self.cfg.attn_res_block != "full"
            is_first = (jnp.arange(group.repeats) == 0) & opens
            scan = nn.scan(
                LayerGroup,
                variable_axes={"params": 0, "intermediates": 0},
                split_rngs={"params": True},
                in_axes=(0, nn.broadcast, nn.broadcast),
                length=group.repeats,
                unroll=group.repeats if self.cfg.unroll_layers else 1,
            )
            body = scan(self.cfg, group.kinds, self.modes, name=f"group_{g}")
            prefix, out = body(prefix, (is_first, own), bank, context)
            # The one source is indexed: a reshape around axes of length one loses their sharding.
            source = None if out.source is None else out.source[0, 0]
            out = out._replace(source=None)
            out = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), out)
            outputs.append(out._replace(source=source))
        return prefix, outputs


def _slice(tree, group: depth.Group, sort: str, used: dict[str, int]):
    """The rows of a per-layer array that this group needs, as [repeats, per group, ...]."""
    per_copy = group.count(sort)
    start, n = used[sort], group.repeats * per_copy
    used[sort] = start + n
    return jax.tree.map(
        lambda a: a[start : start + n].reshape(group.repeats, per_copy, *a.shape[1:]), tree
    )


def _stack(entries):
    present = [e for e in entries if e is not None]
    return jax.tree.map(lambda *a: jnp.stack(a), *present) if present else None


def concatenate(outputs: Sequence[Outputs]) -> Outputs:
    """Joins the outputs of groups of layers, in order; a field that none of them has is None."""

    def joined(entries):
        present = [e for e in entries if e is not None]
        return jax.tree.map(lambda *a: jnp.concatenate(a), *present) if present else None

    return Outputs(*map(joined, zip(*outputs, strict=True)))
