"""Initialisers that also place the parameter on the mesh."""

import jax
import jax.numpy as jnp


def normal(std: float | None, spec, fan_in: int):
    """N(0, std²); std=None takes fan_in^-1/2."""
    scale = fan_in**-0.5 if std is None else std
    draw = jax.nn.initializers.normal(scale)
    return lambda key, shape, dtype: draw(key, shape, dtype, out_sharding=spec)


def constant(value: float, spec):
    """Every entry `value`."""
    return lambda _, shape, dtype: jnp.full(shape, value, dtype, out_sharding=spec)


def uniform(bound: float, spec):
    """U(-bound, bound)."""

    def init(key, shape, dtype):
        return jax.random.uniform(key, shape, dtype, minval=-bound, maxval=bound, out_sharding=spec)

    return init


def inverse_softplus_time_step(spec, low: float = 1e-3, high: float = 1e-1):
    """softplus^-1(dt), dt log-uniform in [low, high]: the decay bias of Mamba-2 and Kimi-Linear."""

    def init(key, shape, dtype):
        log_dt = jax.random.uniform(
            key, shape, jnp.float32, jnp.log(low), jnp.log(high), out_sharding=spec
        )
        dt = jnp.maximum(jnp.exp(log_dt), 1e-4)
        return (dt + jnp.log(-jnp.expm1(-dt))).astype(dtype)

    return init
