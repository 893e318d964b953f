"""Sizes that the mesh cannot split evenly are refused by name and number, from inside a trace."""

import jax
import jax.numpy as jnp
import pytest

from experiments.entry import is_refusal
from k3jax.layers import initializers
from k3jax.parallel import specs
from k3jax.parallel.mesh import MeshConfig, make_mesh


def test_a_width_that_the_mesh_cannot_split_is_a_refusal():
    draw = initializers.normal(0.02, specs.EMBEDDING, 36)
    with jax.set_mesh(make_mesh(MeshConfig(data=4, expert=2))):
        with pytest.raises(
            ValueError, match=r"shape \[5, 36\] has an axis of 36, .* = 8"
        ) as caught:
            jax.jit(lambda key: draw(key, (5, 36), jnp.float32))(jax.random.key(0))
        placed = jax.jit(lambda key: draw(key, (5, 40), jnp.float32))(jax.random.key(0))
    assert is_refusal(caught.value)
    assert placed.addressable_shards[0].data.shape == (5, 5)
