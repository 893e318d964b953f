"""Three steps of training are the same on every mesh, up to the rounding of sums."""

import jax
import numpy as np
import pytest
from small_runs import LENGTH, ROWS, THREE_LAYERS, largest_error, packed

from k3jax.models.kimi_k3.loss import place
from k3jax.parallel.mesh import MeshConfig, make_mesh
from k3jax.train.state import initial_state
from k3jax.train.step import compiled_step, run_optimizer

STEPS = 3

# Partial sums of each device's tokens and rows added up, in three steps through three layers: a
# hundred roundings of 6e-8.
PARTIAL_SUMS = 1e-5
# Equal integer counts, divided and subtracted.
RATIO = 1e-6


def batches():
    """Packed documents of different lengths in each row, one row nearly empty."""
    rng = np.random.default_rng(0)
    lengths = ([15, 29, 3], [LENGTH], [2], [17, 31])
    assert len(lengths) == ROWS
    return [
        packed(*([rng.integers(0, 256, n) for n in row] for row in lengths)) for _ in range(STEPS)
    ]


def run(cfg, **axes):
    """(metrics of each step, final state) on the host."""
    update = compiled_step(THREE_LAYERS, cfg.optimizer, cfg.train.steps)
    with jax.set_mesh(make_mesh(MeshConfig(**axes))):
        state = initial_state(THREE_LAYERS, run_optimizer(cfg.optimizer, cfg.train.steps), 0)
        measured = []
        for batch in batches():
            state, step = update(state, (place(batch),))
            measured.append(jax.device_get(step))
        return measured, jax.device_get(state)


@pytest.fixture(scope="module")
def one_device(run_config):
    return run(run_config)


@pytest.mark.parametrize(
    "axes",
    [
        {"data": 2, "expert": 2},
        {"data": 4},
        {"expert": 4},
    ],
    ids=str,
)
@pytest.mark.slow
def test_losses_counts_bias_and_parameters_equal_those_of_one_device(run_config, one_device, axes):
    expected, alone = one_device
    measured, state = run(run_config, **axes)
    for ours, theirs in zip(measured, expected, strict=True):
        assert abs(ours.loss / theirs.loss - 1) < PARTIAL_SUMS
        assert abs(ours.grad_norm / theirs.grad_norm - 1) < PARTIAL_SUMS
        assert np.array_equal(ours.dead_experts, theirs.dead_experts)
        np.testing.assert_allclose(ours.max_violation, theirs.max_violation, rtol=RATIO)
        assert ours.tokens == theirs.tokens
    assert largest_error(state.router, alone.router) < PARTIAL_SUMS
    assert largest_error(state.params, alone.params) < PARTIAL_SUMS
