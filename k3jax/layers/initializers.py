"""Initialisers that also place the parameter on the mesh.

Each returns init(key, shape, dtype) -> array of that shape and dtype with the sharding `spec`, the
signature that `nn.Module.param` calls.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from k3jax.parallel import mesh

Init = Callable[[jax.Array, tuple[int, ...], jnp.dtype], jax.Array]


def normal(std: float | None, spec: PartitionSpec, fan_in: int) -> Init:
    """N(0, std²); std=None takes fan_in^-1/2. The released configuration has 0.02.

    The returned function raises ValueError when the mesh in force does not divide the shape.
    """
    draw = jax.nn.initializers.normal(fan_in**-0.5 if std is None else std)

    def init(key, shape, dtype):
        mesh.check_divides(shape, spec)
        return draw(key, shape, dtype, out_sharding=spec)

    return init


def constant(value: float, spec: PartitionSpec) -> Init:
    """Every entry `value`."""
    return lambda _, shape, dtype: jnp.full(shape, value, dtype, out_sharding=spec)


def uniform(bound: float, spec: PartitionSpec) -> Init:
    """U(-bound, bound); with bound = W^-1/2 a PyTorch convolution's draw, as in FLA's layers."""

    def init(key, shape, dtype):
        return jax.random.uniform(key, shape, dtype, minval=-bound, maxval=bound, out_sharding=spec)

    return init


def inverse_softplus_time_step(spec: PartitionSpec, low: float = 1e-3, high: float = 1e-1) -> Init:
    """softplus^-1(dt), dt log-uniform in [low, high]: the decay bias of Mamba-2 and Kimi-Linear.

    dt is at least 1e-4, as in their code; drawn in float32 and rounded once to the dtype.
    """

    def init(key, shape, dtype):
        log_dt = jax.random.uniform(
            key, shape, jnp.float32, jnp.log(low), jnp.log(high), out_sharding=spec
        )
        dt = jnp.maximum(jnp.exp(log_dt), 1e-4)
        return (dt + jnp.log(-jnp.expm1(-dt))).astype(dtype)

    return init
