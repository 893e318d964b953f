"""The state of training: all that a step reads and writes, and all that a checkpoint holds."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from k3jax.models.kimi_k3 import model
from k3jax.models.kimi_k3.config import ModelConfig


class TrainState(NamedTuple):
    """A pytree of arrays.

    Attributes:
      step: int32 [], optimizer updates done.
      params: Trained by the optimizer.
      router: Quantile-balancing bias [L_moe + mtp_layers, E] float32; no gradient, no optimizer,
        no decay.
      opt_state: The optimizer's state.
      key: uint32 key data, the root of every random number after initialisation.
    """

    step: jax.Array
    params: Any
    router: Any
    opt_state: Any
    key: jax.Array


def create_state(cfg: ModelConfig, tx, seed: int) -> TrainState:
    """Initialises parameters, router bias, optimizer and key from one seed.

    Pure and traceable: `jax.eval_shape` of it gives every shape and sharding without memory.

    Args:
      cfg: The model.
      tx: A gradient transformation with `init(params)`.
      seed: Any int; two equal seeds give two equal states.
    """
    init_key, run_key = jax.random.split(jax.random.key(seed))
    return _state_of(model.init(cfg, init_key), tx, run_key)


def state_from(variables: Any, tx, seed: int) -> TrainState:
    """A state at step 0 with given {"params", "router"}, and the key of `create_state`."""
    return _state_of(variables, tx, jax.random.split(jax.random.key(seed))[1])


def _state_of(variables: Any, tx, run_key: jax.Array) -> TrainState:
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=variables["params"],
        router=variables["router"],
        # Gradients are float32 whatever the parameters are, and so are the moments from the start.
        opt_state=tx.init(jax.tree.map(lambda a: a.astype(jnp.float32), variables["params"])),
        key=jax.random.key_data(run_key),
    )


def initial_state(cfg: ModelConfig, tx, seed: int) -> TrainState:
    """`create_state`, compiled: every array is made where its sharding puts it.

    It runs once, so it is compiled for a short compilation (a quarter of the time). Another run
    of the same model, transformation object and seed in this process reuses the program.
    """
    return _compiled(cfg, tx, seed)()


@functools.lru_cache(maxsize=8)
def _compiled(cfg: ModelConfig, tx, seed: int):
    options = {"xla_backend_optimization_level": 0}
    return jax.jit(lambda: create_state(cfg, tx, seed), compiler_options=options)
