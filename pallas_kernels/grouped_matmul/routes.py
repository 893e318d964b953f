"""Arranges the S * k routes of a router by expert, without dropping and without scatters of rows.

The permutation is known in both directions, so rows move by gathers only, forward and backward.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.layout import block_layout, default_block_size, take_rows


class Routes(NamedTuple):
    """Where each route (token s, choice i, flat number s * k + i) lies among R rows.

    Attributes:
      owner: the expert of each block, [N] int32, or rows per expert, [E] int32 (`sort_routes`).
      route: [R] int32, the route in each row, S * k where the row is empty.
      row: [S, k] int32, the row of each route, R where the route takes none.
    """

    owner: jax.Array
    route: jax.Array
    row: jax.Array

    def gather(self, table: jax.Array) -> jax.Array:
        """Brings per-token rows [S, L] to the arrangement [R, L]; empty rows are zero."""
        # An empty row's route S * k divides to token S, which is out of range and reads zero.
        return take_rows(table, self.route // self.row.shape[1])

    def combine(self, rows: jax.Array, weights: jax.Array | None = None) -> jax.Array:
        """Sums each token's k rows in the order of its choices: [R, L] -> [S, L] float32.

        The order is the token's own, so the sum does not depend on how experts are arranged.
        """
        total = None
        for i in range(self.row.shape[1]):
            term = take_rows(rows, self.row[:, i]).astype(jnp.float32)
            term = term if weights is None else weights[:, i, None] * term
            total = term if total is None else total + term
        return total


def sort_routes(expert: jax.Array, experts: int) -> Routes:
    """Sorts routes by expert into R = S * k rows; routes without an expert come last, empty.

    Args:
      expert: [S, k] int32; a value outside 0..experts-1 takes no row.
      experts: E, static.
    """
    sizes, order = _count_and_sort(expert, experts)
    place = jnp.arange(order.size, dtype=jnp.int32)
    used = place < jnp.sum(sizes)
    route = jnp.where(used, order, order.size)
    return Routes(sizes, route, _invert(order, jnp.where(used, place, order.size), expert))


def block_routes(expert: jax.Array, experts: int, block_size: int | None) -> Routes:
    """Deals routes into blocks of one expert each; R = N * b as in `block_layout`."""
    sizes, order = _count_and_sort(expert, experts)
    block_size = block_size or default_block_size(order.size, experts)
    layout = block_layout(sizes, order.size, block_size)
    # Padding slots point at sorted row S * k, past the end, which reads as route S * k.
    route = order.at[layout.row.ravel()].get(mode="fill", fill_value=order.size)
    return Routes(layout.group, route, _invert(order, layout.slot, expert))


def _count_and_sort(expert, experts):
    """Rows per expert [E], and the routes in expert order [S * k], ties in route order."""
    flat = expert.ravel()
    key = jnp.where((flat >= 0) & (flat < experts), flat, experts)
    order = jnp.argsort(key, stable=True).astype(jnp.int32)
    sorted_key = key.at[order].get(mode="promise_in_bounds")
    bounds = jnp.searchsorted(sorted_key, jnp.arange(experts + 1)).astype(jnp.int32)
    return bounds[1:] - bounds[:-1], order


def _invert(order, row_of_sorted, like):
    """The row of each route, given the row of each sorted position."""
    row = jnp.zeros_like(order).at[order].set(row_of_sorted, unique_indices=True)
    return row.reshape(like.shape)
