"""What a training step keeps besides its state, per device, estimated from traces of single layers.

A layer's residuals are read off the program that `jax.vjp` makes of the real layer on the mesh in
force, so they follow the code and its shardings; nothing is allocated. With R the residuals of a
layer, s the bytes of one activation [B, T, D] and N a layer's parameters, whole:

    kept   = Σ R, or with remat  s · (layers + frozen rows)
    layer  = max (R for the cotangents, + R where remat computes them again, + 4 N: its float32
             gradient before it is cut)
    head   = 2 chunks of float32 logits + the head and its float32 gradient, whole

It is an estimate. XLA shares buffers and fuses away some residuals, and holds temporaries that no
residual shows; `tests/k3jax/train/test_plan.py` says how far off it is for a compiled step.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.sharding import PartitionSpec

from k3jax.models.kimi_k3 import backbone, depth
from k3jax.models.kimi_k3.config import ModelConfig
from k3jax.parallel import specs

# Float32 logits of one chunk on an accelerator (pallas_kernels/cross_entropy); the gradient of
# them is as large.
_LOGITS = 2**26


class Activations(NamedTuple):
    """Bytes on one device; `kept` lives through the backward pass, of the others one at a time."""

    kept: int
    layer: int
    head: int

    @property
    def peak(self) -> int:
        """Most at any one time."""
        return self.kept + max(self.layer, self.head)


Samples = Mapping[depth.LayerKind, Any]  # shapes of the parameters of one layer of each kind


def samples(cfg: ModelConfig, params: Any) -> Samples:
    """One layer of each kind, out of the parameters of a whole model or their shapes."""
    return {kind: _layer_shapes(params, path) for kind, path, _ in depth.parameter_paths(cfg)}


def estimate(cfg: ModelConfig, layers: Samples, rows: int, sequence_length: int) -> Activations:
    """Estimates a step of `rows` sequences at once over the whole mesh in force.

    Args:
      cfg: the model.
      layers: from `samples`, of this model or of one with the same kinds of layers.
      rows: B, sequences of one micro-batch on all devices; a multiple of those that split it.
      sequence_length: T.
    """
    whole = (rows, sequence_length, cfg.hidden_size)
    stream = local_bytes(_array(whole, cfg.compute_type, specs.ACTIVATION))
    kinds = [kind for kind, *_ in depth.parameter_paths(cfg)]
    traced = {k: _layer(cfg, k, shapes, rows, sequence_length) for k, shapes in layers.items()}
    frozen = depth.frozen_rows(cfg)
    if cfg.remat:
        kept = stream * (len(kinds) + frozen)
        layer = max(2 * again + 4 * size for again, size in traced.values())
    else:
        kept = sum(traced[kind][0] for kind in kinds)
        layer = max(cotangents + 4 * size for cotangents, size in traced.values())
    tokens = stream // (cfg.hidden_size * cfg.compute_type.dtype.itemsize)
    logits = cfg.vocab_size * min(tokens, max(_LOGITS // cfg.vocab_size, 64))
    head = cfg.vocab_size * cfg.hidden_size * (cfg.compute_type.dtype.itemsize + 4)
    return Activations(kept, layer, 2 * 4 * logits + head)


def local_bytes(tree: Any) -> int:
    """Bytes that one device holds of a tree of arrays, tracers or shapes with shardings."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        total += math.prod(shape) * leaf.dtype.itemsize
    return total


def _layer_shapes(params: Any, path: tuple[str, ...]) -> Any:
    """Shapes of one layer: those of its group without the axis over the group's copies."""
    tree = functools.reduce(lambda node, name: node[name], path, params)
    return jax.tree.map(
        lambda a: _array(a.shape[1:], a.dtype, PartitionSpec(*a.sharding.spec[1:])), tree
    )


def _layer(
    cfg: ModelConfig, kind: depth.LayerKind, params: Any, rows: int, T: int
) -> tuple[int, int]:
    """(bytes of one layer's residuals, its parameters), with as many frozen rows as the last."""
    layer = backbone.Layer(cfg, kind, backbone.Modes(train=True))
    stream = _array((rows, T, cfg.hidden_size), cfg.compute_type, specs.ACTIVATION)
    frozen = depth.frozen_rows(cfg)
    ids = _array((rows, T), jnp.int32, specs.TOKENS)
    bias = _array((cfg.moe.experts,), jnp.float32, specs.VECTOR)

    def backward(params, prefix, bank, ids, bias):
        context = backbone.Context(ids, ids > 0, None)
        fixed = jnp.zeros((), bool), context, backbone.PerLayer(bias, None, None)

        def run(params, prefix, bank):
            return layer.apply({"params": params}, prefix, bank, *fixed)

        return jax.vjp(run, params, prefix, bank, has_aux=True)[1]

    jaxpr = jax.make_jaxpr(backward)(params, stream, (stream,) * frozen, ids, bias).jaxpr
    # What came in is held anyway: parameters, the stream and the frozen rows.
    made = {v for v in jaxpr.outvars if not isinstance(v, Literal)} - set(jaxpr.invars)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    return local_bytes([v.aval for v in made]), size


def _array(shape: tuple[int, ...], dtype: Any, spec) -> jax.ShapeDtypeStruct:
    mesh = jax.sharding.get_abstract_mesh()
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.NamedSharding(mesh, spec))
