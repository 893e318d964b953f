"""Products that keep the precision of their operands on every platform.

GPUs round float32 operands to TF32, ten bits of mantissa, unless told not to: that loses a KDA
state over long sequences and is further from an oracle than the tolerances allow. Narrower
operands are multiplied exactly anyway and keep the default; a CPU ignores the setting.
"""

import jax
import jax.numpy as jnp


def full_precision(*operands: jax.Array) -> jax.lax.Precision | None:
    """The `precision` argument of a product: HIGHEST from float32 on, None below."""
    wide = jnp.result_type(*operands).itemsize >= jnp.dtype(jnp.float32).itemsize
    return jax.lax.Precision.HIGHEST if wide else None


def einsum(
    equation: str,
    *operands: jax.Array,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    out_sharding: jax.sharding.PartitionSpec | None = None,
) -> jax.Array:
    """`jnp.einsum` without TF32; accumulated in `preferred_element_type`."""
    return jnp.einsum(
        equation,
        *operands,
        precision=full_precision(*operands),
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )


def dot(
    a: jax.Array, b: jax.Array, preferred_element_type: jax.typing.DTypeLike | None = None
) -> jax.Array:
    """`jnp.dot` without TF32; accumulated in `preferred_element_type`."""
    return jnp.dot(
        a, b, precision=full_precision(a, b), preferred_element_type=preferred_element_type
    )
