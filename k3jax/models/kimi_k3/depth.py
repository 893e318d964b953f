"""Where depth is laid out: blocks of Attention Residuals, groups of layers, repeats.

93 layers of K3 are 8 blocks of 12 (the last of 9). A block freezes one row and holds groups that
end with a latent-attention layer; neighbouring equal groups are one `Group` with `repeats`, which
the backbone scans. The first group (dense feed-forward) and the last (a lone latent-attention
layer) differ and stand alone.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from k3jax.models.kimi_k3.config import ModelConfig


class LayerKind(NamedTuple):
    """What one transformer layer is made of."""

    mixer: str  # "kda" or "mla"
    ffn: str  # "dense" or "moe"


class Group(NamedTuple):
    """`repeats` copies of the same run of layers, whose parameters share one leading axis."""

    kinds: tuple[LayerKind, ...]
    repeats: int
    first_layer: int

    def count(self, kind: str) -> int:
        """Layers of this mixer or feed-forward in one copy."""
        return sum(kind in k for k in self.kinds)


def layer_kinds(cfg: ModelConfig) -> list[LayerKind]:
    """The kind of every layer, first to last."""
    mla = set(cfg.mla_layers)
    return [
        LayerKind("mla" if i in mla else "kda", "dense" if i < cfg.dense_layers else "moe")
        for i in range(cfg.num_layers)
    ]


def mtp_group(cfg: ModelConfig) -> Group:
    """The layer of multi-token prediction, which counts as one past the last."""
    return Group((LayerKind("mla", "moe"),), 1, cfg.num_layers)


def blocks(cfg: ModelConfig) -> list[list[Group]]:
    """Blocks in order.

    One block holds everything when residuals are plain; one holds one layer in the full form, where
    every layer has other sources and so is a program of its own.
    """
    kinds, size = layer_kinds(cfg), block_size(cfg)
    return [_groups(kinds[start : start + size], start) for start in range(0, cfg.num_layers, size)]


def block_size(cfg: ModelConfig) -> int:
    """Layers in a block; the last one may hold fewer."""
    return 1 if cfg.attn_res_block == "full" else cfg.attn_res_block or cfg.num_layers


def frozen_rows(cfg: ModelConfig) -> int:
    """Rows behind the newest sublayer that the read after the last layer still holds."""
    if cfg.attn_res_block is None:
        return 0
    return 2 * cfg.num_layers if cfg.attn_res_block == "full" else len(blocks(cfg))


def _groups(kinds: list[LayerKind], start: int) -> list[Group]:
    runs: list[tuple[LayerKind, ...]] = []
    current: list[LayerKind] = []
    for kind in kinds:
        current.append(kind)
        if kind.mixer == "mla":
            runs.append(tuple(current))
            current = []
    if current:
        runs.append(tuple(current))
    groups = []
    for run, copies in itertools.groupby(runs):
        repeats = len(list(copies))
        groups.append(Group(run, repeats, start))
        start += repeats * len(run)
    return groups


def layer_paths(cfg: ModelConfig) -> Iterator[tuple[int, LayerKind, tuple[str, str, str], int]]:
    """Yields (layer, kind, module path, index on the leading axis) for every layer, in order."""
    for b, groups in enumerate(blocks(cfg)):
        for g, group in enumerate(groups):
            for copy in range(group.repeats):
                for i, kind in enumerate(group.kinds):
                    layer = group.first_layer + copy * len(group.kinds) + i
                    yield layer, kind, (f"block_{b}", f"group_{g}", f"layer_{i}"), copy


def parameter_paths(cfg: ModelConfig) -> Iterator[tuple[LayerKind, tuple[str, ...], int]]:
    """Yields (kind, path below `params`, index on the leading axis) for every layer that trains.

    The stack's layers in order, then the layer of multi-token prediction: the n-th with experts
    owns row n of the router bias and of the statistics, the n-th with latent attention row n of the
    largest logits.
    """
    for _, kind, path, copy in layer_paths(cfg):
        yield kind, ("backbone", *path), copy
    for _ in range(cfg.mtp_layers):
        yield mtp_group(cfg).kinds[0], ("mtp", "block", "group_0", "layer_0"), 0


def mla_paths(cfg: ModelConfig) -> list[tuple[tuple[str, ...], int]]:
    """(parameter path of the mixer, index on the leading axis) of each row of `max_logits`."""
    return [
        ((*path, "mixer"), copy) for kind, path, copy in parameter_paths(cfg) if kind.mixer == "mla"
    ]
