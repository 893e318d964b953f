"""Aligns groups of rows to blocks, so that a grouped product becomes one batched product.

Rows sorted by group are dealt into blocks of `b` slots, each block owned by one group; the last
block of a group is padded. Every shape is static: the number of blocks is the most that any
distribution of the rows over the groups can need.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Below 16 rows a product is bound by its weights whatever the height; above 128, measured on CPU,
# the padding costs more than the larger product gains.
MIN_BLOCK, MAX_BLOCK = 16, 128


class BlockLayout(NamedTuple):
    """Where each row lies among N blocks of b slots.

    Attributes:
      group: [N] int32, the group that owns the block (a used one also for blocks with no rows).
      row: [N, b] int32, the row in each slot, M where the slot is padding.
      slot: [M] int32, the flat slot of each row, N * b where the row belongs to no group.
    """

    group: jax.Array
    row: jax.Array
    slot: jax.Array


def default_block_size(rows: int, groups: int) -> int:
    """Largest power of two whose padding adds at most a quarter to `rows` in the worst case.

    Kept within 16..128, so the quarter holds from 64 rows per group on.
    """
    mean = rows // max(1, min(groups, rows))
    largest = max(1, mean // 4)
    return min(MAX_BLOCK, max(MIN_BLOCK, 1 << (largest.bit_length() - 1)))


def block_count(rows: int, groups: int, block_size: int) -> int:
    """The most blocks that `rows` rows in `groups` groups can fill; at least 1."""
    # sum_e ceil(n_e / b) <= (sum_e n_e + (b - 1) * [groups with a row]) / b
    return max(1, (rows + min(groups, rows) * (block_size - 1)) // block_size)


def block_layout(group_sizes: jax.Array, rows: int, block_size: int) -> BlockLayout:
    """Lays out `rows` rows, sorted by group, in blocks of `block_size` slots.

    Args:
      group_sizes: [E] int32; group e owns the next group_sizes[e] rows. Rows past the sum belong
        to no group; sizes past `rows` are cut.
      rows: M, the static number of rows.
      block_size: b, static.
    """
    blocks = block_count(rows, group_sizes.shape[0], block_size)
    ends = jnp.minimum(jnp.cumsum(group_sizes), rows).astype(jnp.int32)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    blocks_of_group = -(-(ends - starts) // block_size)
    block_ends = jnp.cumsum(blocks_of_group)
    block_starts = block_ends - blocks_of_group

    # Blocks past the last used one repeat its group: an empty group's weights are never touched.
    last_used = jnp.maximum(block_ends[-1] - 1, 0)
    block = jnp.minimum(jnp.arange(blocks, dtype=jnp.int32), last_used)
    group = _group_at(block_ends, block)
    place = jnp.arange(blocks, dtype=jnp.int32) - _at(block_starts, group)
    slot_row = (_at(starts, group) + place * block_size)[:, None] + jnp.arange(block_size)
    slot_row = jnp.where(slot_row < _at(ends, group)[:, None], slot_row, rows)

    row = jnp.arange(rows, dtype=jnp.int32)
    owner = _group_at(ends, row)
    slot = _at(block_starts, owner) * block_size + row - _at(starts, owner)
    slot = jnp.where(row < ends[-1], slot, blocks * block_size)
    return BlockLayout(group, slot_row.astype(jnp.int32), slot.astype(jnp.int32))


def take_rows(table: jax.Array, index: jax.Array) -> jax.Array:
    """Rows of `table` [R, ...] at `index` [...]; exactly 0 where the index is R."""
    return jnp.asarray(table).at[index].get(mode="fill", fill_value=0)


def _group_at(ends: jax.Array, position: jax.Array) -> jax.Array:
    """The group whose half-open interval holds `position`; skips empty groups."""
    found = jnp.searchsorted(ends, position, side="right")
    return jnp.minimum(found, ends.shape[0] - 1).astype(jnp.int32)


def _at(table: jax.Array, index: jax.Array) -> jax.Array:
    return table.at[index].get(mode="promise_in_bounds")
