"""Refuses weights that are not numbers, and says where: their output would be one id repeated."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from k3jax.models.kimi_k3 import depth
from k3jax.models.kimi_k3.config import ModelConfig


def check_finite(cfg: ModelConfig, variables: Any) -> None:
    """Looks at every number once, on the host: nothing is compiled before the first step.

    Args:
      cfg: The model.
      variables: {"params", "router"}.

    Raises:
      ValueError: a NaN or an infinity; names the first parameter in the order of the forward
        pass, its layer and how many of its numbers are wrong.
    """
    wrong = jax.tree_util.tree_map_with_path(_wrong, variables)
    for where, counts in _in_order(cfg, wrong):
        for path, count in jax.tree_util.tree_leaves_with_path(counts):
            if count:
                name = "/".join(str(key.key) for key in path)
                raise ValueError(
                    f"parameter {name} of {where} holds {count} numbers that are not finite; "
                    "the file is damaged or its run has diverged: use an earlier checkpoint"
                )


def _wrong(path, leaf: jax.Array) -> np.ndarray:
    """Numbers that are not finite: [copies] in a stacked leaf of the backbone, [] elsewhere."""
    stacked = any(str(key.key).startswith("layer_") for key in path)
    # Layers are never split over devices, so every shard has the whole leading axis.
    counts = np.zeros(leaf.shape[:1] if stacked else (), np.int64)
    for shard in leaf.addressable_shards:
        if shard.replica_id == 0:
            data = np.asarray(shard.data)
            counts += np.sum(~np.isfinite(data), axis=tuple(range(counts.ndim, data.ndim)))
    return counts


def _in_order(cfg: ModelConfig, wrong: Any) -> Iterator[tuple[str, Any]]:
    """(where, counts) from the embedding to the head; then the router's bias."""
    params = dict(wrong["params"])
    backbone = params.pop("backbone")
    yield "the embedding", {"embedding": params.pop("embedding")}
    for layer, _, (block, group, name), copy in depth.layer_paths(cfg):
        leaves = jax.tree.map(lambda count, copy=copy: count[copy], backbone[block][group][name])
        yield f"layer {layer} (from 0)", leaves
    ahead = params.pop("mtp", None)
    rest = {key: value for key, value in backbone.items() if not key.startswith("block_")}
    yield "the model's end", {**rest, **params}
    if ahead is not None:
        yield "the multi-token layer", jax.tree.map(np.sum, ahead)
    yield "the router", wrong["router"]
