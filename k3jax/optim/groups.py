"""Joins the matrix blocks of many leaves into one stack per block shape, and splits them again.

Newton-Schulz is some forty operations a leaf. A model of many small leaves spends more time on
compiling and dispatching those than on their products; of a stack of equal blocks they are written
once. A block and its transpose have the same singular vectors, so tall blocks join the wide ones.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.varying import varying_axes

MatrixAxes = Callable[[Any, jax.Array], tuple[tuple[int, ...], tuple[int, ...]]]

# Elements of the largest leaf that is joined to others. Beyond it products are what takes time,
# and a stack would hold second copies of the leaf, its momentum and its update in memory.
MAX_JOINED_SIZE = 2**22


def join(tree: Any, matrix_axes: MatrixAxes) -> dict[str, jax.Array]:
    """Stacks of blocks [N, m, n] with m <= n, by block shape.

    Args:
      tree: leaves whose blocks are whole on this device: outside any mesh, or inside `shard_map`.
      matrix_axes: (key path, leaf) -> the nonnegative axes of a block's rows and of its columns.
    """
    members: dict[str, list[jax.Array]] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        blocks = _to_blocks(x, *matrix_axes(path, x))
        members.setdefault(_key(path, x, blocks), []).append(blocks)
    return {key: jnp.concatenate(blocks) for key, blocks in members.items()}


def split(groups: dict[str, jax.Array], like: Any, matrix_axes: MatrixAxes) -> Any:
    """Inverse of `join`: the tree of `like`, whose leaves give shapes and dtypes only."""
    used = dict.fromkeys(groups, 0)

    def take(path, x):
        shape = jax.eval_shape(lambda leaf: _to_blocks(leaf, *matrix_axes(path, leaf)), x)
        key = _key(path, x, shape)
        start, used[key] = used[key], used[key] + shape.shape[0]
        blocks = jax.lax.slice_in_dim(groups[key], start, used[key])
        return _from_blocks(blocks, x, *matrix_axes(path, x))

    return jax.tree_util.tree_map_with_path(take, like)


def _key(path: Any, x: jax.Array, blocks: Any) -> str:
    """Name of a leaf's stack. Leaves that vary over other mesh axes cannot be one array."""
    name = "{}x{}".format(*blocks.shape[1:])
    alone = jax.tree_util.keystr(path) if x.size > MAX_JOINED_SIZE else ""
    return " ".join((name, *sorted(varying_axes(x)), alone)).strip()


def _to_blocks(x: jax.Array, rows: tuple[int, ...], columns: tuple[int, ...]) -> jax.Array:
    """Leaf -> [N, m, n]; counting axes first, the longer side of a block last."""
    order, counting, m, n = _layout(x.shape, rows, columns)
    blocks = x.transpose(order).reshape(counting, m, n)
    return blocks if m <= n else blocks.swapaxes(1, 2)


def _from_blocks(
    blocks: jax.Array, like: jax.Array, rows: tuple[int, ...], columns: tuple[int, ...]
) -> jax.Array:
    """Inverse of `_to_blocks`, in the shape and dtype of `like`."""
    order, _, m, n = _layout(like.shape, rows, columns)
    x = blocks if m <= n else blocks.swapaxes(1, 2)
    x = x.reshape([like.shape[axis] for axis in order])
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return x.transpose(inverse).astype(like.dtype)


def _layout(
    shape: tuple[int, ...], rows: tuple[int, ...], columns: tuple[int, ...]
) -> tuple[tuple[int, ...], int, int, int]:
    """Order of the axes, then the number of blocks, their rows and their columns."""
    counting = tuple(axis for axis in range(len(shape)) if axis not in rows + columns)
    sizes = [math.prod(shape[axis] for axis in axes) for axes in (counting, rows, columns)]
    return (*counting, *rows, *columns), *sizes
