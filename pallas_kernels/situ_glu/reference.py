"""Oracles of the gated activations, float32, differentiated by JAX."""

import jax
import jax.numpy as jnp


def reference_situ_glu(
    g: jax.Array, u: jax.Array, *, beta: float, linear_beta: float | None
) -> jax.Array:
    """Eq. 12: β1 tanh(g / β1) σ(g) · β2 tanh(u / β2)."""
    g32, u32 = g.astype(jnp.float32), u.astype(jnp.float32)
    linear = u32 if linear_beta is None else linear_beta * jnp.tanh(u32 / linear_beta)
    return (beta * jnp.tanh(g32 / beta) * jax.nn.sigmoid(g32) * linear).astype(g.dtype)


def reference_swiglu(g: jax.Array, u: jax.Array) -> jax.Array:
    """g σ(g) u."""
    g32, u32 = g.astype(jnp.float32), u.astype(jnp.float32)
    return (g32 * jax.nn.sigmoid(g32) * u32).astype(g.dtype)
