"""The text run that the tests of step and loop share, and its initial state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import LENGTH, MODEL, ROWS

from k3jax.data.config import DataConfig
from k3jax.models.kimi_k3.loss import forward_nll, place, total_weight
from k3jax.optim.optimizer import OptimizerConfig
from k3jax.parallel.mesh import make_mesh
from k3jax.train.config import RunConfig, TrainConfig
from k3jax.train.state import initial_state
from k3jax.train.step import run_optimizer


@pytest.fixture(scope="session")
def run_config(tmp_path_factory):
    """A text run on a few made-up files: every loop feature in ten steps."""
    texts = tmp_path_factory.mktemp("texts")
    words = "state decay gate router expert token value query layer block norm head".split()
    rng = np.random.default_rng(0)
    for index in range(24):
        lines = [" ".join(rng.choice(words, 9)) for _ in range(30)]
        (texts / f"{index:02}.txt").write_text("\n".join(lines))
    return RunConfig(
        model=MODEL,
        optimizer=OptimizerConfig(peak_lr=3e-3),
        data=DataConfig(
            source=str(texts),
            vocab_size=288,
            sequence_length=LENGTH,
            validation_fraction=0.2,
            cache_dir=str(tmp_path_factory.mktemp("cache")),
        ),
        train=TrainConfig(
            steps=10, batch_size=ROWS, micro_batches=2, eval_every=5, eval_batches=2,
            eval_batch_size=ROWS, sample_every=5, sample_tokens=8, checkpoint_every=5, log_every=1,
        ),
    )  # fmt: skip


@pytest.fixture(scope="session")
def fresh(run_config):
    """() -> the initial state, in new buffers each time because the step gives them away."""
    with jax.set_mesh(make_mesh()):
        tx = run_optimizer(run_config.optimizer, run_config.train.steps)
        state = initial_state(MODEL, tx, 0)
    return lambda: jax.tree.map(jnp.copy, state)


@pytest.fixture(scope="session")
def whole_gradient():
    """(state, host batch [ROWS, LENGTH]) -> ((mean loss, router statistics), gradient).

    Of the whole batch at once; compiled once for all files.
    """

    def mean(params, router, batch):
        nll, stats = forward_nll(MODEL, params, router, batch, train=True)
        return nll / total_weight(batch), stats

    compiled = jax.jit(jax.value_and_grad(mean, has_aux=True))
    return lambda state, batch: compiled(state.params, state.router, place(batch))
