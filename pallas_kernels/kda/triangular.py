"""Inverse of a unit lower triangular matrix, by doubling the size of true inverse blocks.

Every intermediate is an entry of the inverse itself, so nothing cancels. The popular product
(I - L)(I + L²)(I + L⁴)… is the same polynomial, but with correlated keys and slow decay the powers
of L grow to thousands before they cancel, and the result is noise.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.precision import einsum

TILE = 16


@jax.custom_jvp
def unit_lower_inverse(strict: jax.Array) -> jax.Array:
    """(I + L)^-1 for a strictly lower triangular L.

    Args:
      strict: L, [..., C, C]; entries on and above the diagonal must be zero. C is a power of two.

    Returns:
      The inverse, [..., C, C], unit lower triangular. Its derivative is -T dL T, two products
      instead of the chain through every doubling; differentiable any number of times.
    """
    size = strict.shape[-1]
    width = min(size, TILE)
    inverse = _tile_inverse(_blocks(strict, range(0, size, width), 0, width))
    while width < size:
        # [[A, 0], [C, B]] has the inverse [[A^-1, 0], [-B^-1 C A^-1, B^-1]].
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = _blocks(strict, range(0, size, 2 * width), width, width)
        inverse = lower_blocks(first, -_product(second, _product(corner, first)), second)
        width *= 2
    return inverse[..., 0, :, :]


@unit_lower_inverse.defjvp
def _unit_lower_inverse_jvp(primals, tangents):
    inverse = unit_lower_inverse(*primals)
    return inverse, -_product(_product(inverse, *tangents), inverse)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return einsum("...ij,...jk->...ik", a, b)


def _tile_inverse(strict: jax.Array) -> jax.Array:
    """Doubling 1 -> 2 -> 4 -> 8 -> 16 with whole-tile products: small blocks cost more to slice."""
    size = strict.shape[-1]
    index = np.arange(size)
    inverse = np.eye(size, dtype=strict.dtype) - strict * _below_diagonal_blocks(index, 1)
    width = 2
    while width < size:
        corner = strict * _below_diagonal_blocks(index, width)
        inverse = inverse - _product(inverse, _product(corner, inverse))
        width *= 2
    return inverse


def _below_diagonal_blocks(index: np.ndarray, width: int) -> np.ndarray:
    """Mask of the lower left block of every pair of neighbouring diagonal blocks of `width`."""
    row, column = index[:, None] // width, index[None, :] // width
    return (row % 2 == 1) & (column == row - 1)


def _blocks(matrix: jax.Array, starts: range, below: int, width: int) -> jax.Array:
    """Square blocks `below` rows under the diagonal entries `starts`: [..., n, width, width]."""
    cut = [matrix[..., i + below : i + below + width, i : i + width] for i in starts]
    return jnp.stack(cut, axis=-3)


def lower_blocks(first: jax.Array, corner: jax.Array, second: jax.Array) -> jax.Array:
    """[[first, 0], [corner, second]] in the last two axes."""
    top = jnp.concatenate([first, jnp.zeros_like(corner)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([corner, second], axis=-1)], axis=-2)
