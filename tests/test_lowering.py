"""The full-size model without a device: parameter count, and the whole training step, traced."""

import time

import chex
import jax
import jax.numpy as jnp
import pytest

from configs import kimi_k3
from k3jax.models.kimi_k3 import model
from k3jax.optim.optimizer import learning_rate, make_optimizer
from k3jax.parallel import specs
from k3jax.parallel.mesh import MeshConfig, abstract_mesh
from k3jax.train.state import create_state
from k3jax.train.step import train_step

# The report's text parameters and balancing biases, less the zeros that pad 69 decay vectors from
# 96 to 128 entries.
PUBLISHED = 2_779_484_478_208 - 69 * 32


MESHES = {"one device": MeshConfig(), "128 devices": MeshConfig(data=8, expert=16)}


def count(tree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def test_the_released_model_has_the_published_number_of_parameters():
    key = jax.eval_shape(lambda: jax.random.key(0))
    with jax.sharding.use_abstract_mesh(abstract_mesh(MeshConfig())):
        shapes = jax.eval_shape(lambda k: model.init(kimi_k3.MODEL, k), key)
    assert count(shapes) == PUBLISHED
    assert shapes["router"]["backbone"]["bias"].shape == (92, 896)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["one device", "128 devices"])
def test_the_whole_training_step_of_93_layers_traces_in_two_minutes(mesh):
    run, shape = kimi_k3.config(), MESHES[mesh]
    tx = make_optimizer(run.optimizer, run.train.steps)
    rate = learning_rate(run.optimizer, run.train.steps)
    rows = 2 * shape.data * shape.expert
    begin = time.process_time()  # one thread: wall time of an idle core, whatever else runs here
    with jax.sharding.use_abstract_mesh(abstract_mesh(shape)) as active:
        state = jax.eval_shape(lambda: create_state(run.model, tx, 0))
        split = jax.sharding.NamedSharding(active or abstract_mesh(shape), specs.TOKENS)
        column = lambda dtype: jax.ShapeDtypeStruct((rows, 256), dtype, sharding=split)  # noqa: E731
        batch = {
            "tokens": column(jnp.int32), "targets": column(jnp.int32),
            "segment_ids": column(jnp.int32), "weights": column(jnp.float32),
        }  # fmt: skip
        traced = jax.jit(train_step(run.model, tx, rate, qk_clip=run.optimizer.qk_clip)).trace(
            state, (batch,)
        )
    assert time.process_time() - begin < 120
    new_state, metrics = traced.out_info
    chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
    assert metrics.max_violation.shape == (92,)
