"""Every recipe of configs/ablations changes what it says and nothing else, and trains."""

import importlib
import pathlib

import jax
import numpy as np
import pytest

from configs import ablations
from k3jax.config import differences, load_recipe, override
from k3jax.train.config import RunConfig
from k3jax.train.state import create_state
from k3jax.train.step import run_optimizer, train_step

FOLDER = pathlib.Path(ablations.__file__).parent
NAMES = sorted(file.stem for file in FOLDER.glob("[!_]*.py"))
# The least model that a recipe's changes are made to: a layer of latent attention and experts.
LEAST = (
    "model.vocab_size=259", "model.hidden_size=16", "model.num_layers=1", "model.mla_layers=0",
    "model.dense_layers=0", "model.mla.heads=1", "model.mla.q_lora_rank=8",
    "model.mla.kv_lora_rank=8", "model.mla.nope_dim=8", "model.mla.shared_dim=4",
    "model.mla.value_dim=8", "model.moe.experts=4", "model.moe.expert_width=8",
    "model.moe.latent_dim=8", "model.moe.shared_width=8", "model.moe.histogram_bins=16",
    "model.attn_res_block=1", "data.vocab_size=259", "optimizer.muon_ns_steps=1",
)  # fmt: skip
# With both mixers, for the tests that take their time.
DEEPER = (
    *LEAST, "model.num_layers=2", "model.mla_layers=1", "model.dense_layers=1",
    "model.dense_width=16", "model.kda.heads=1", "model.kda.key_dim=16", "model.kda.value_dim=16",
    "model.kda.decay_rank=8",
)  # fmt: skip
ROWS, LENGTH = 2, 16


def recipe(name):
    """The recipe's module: a recipe here defines BASE, CHANGES and config()."""
    return importlib.import_module(f"configs.ablations.{name}")


def batch(rng):
    """Two documents a row, with targets inside them."""
    tokens = rng.integers(0, 259, (ROWS, LENGTH)).astype(np.int32)
    ids = np.repeat(np.array([[1, 2]], np.int32), [9, 7], axis=1).repeat(ROWS, axis=0)
    inside = np.pad(ids[:, 1:] == ids[:, :-1], ((0, 0), (0, 1)))
    targets = np.where(inside, np.roll(tokens, -1, axis=1), 0).astype(np.int32)
    return {
        "tokens": tokens, "targets": targets, "segment_ids": ids,
        "weights": inside.astype(np.float32),
    }  # fmt: skip


def step_of(cfg):
    """The initial state (traced) and the step of a run."""
    tx = run_optimizer(cfg.optimizer, 10)
    return lambda: create_state(cfg.model, tx, 0), train_step(cfg.model, tx, lambda _: 0.0)


def test_the_folder_holds_the_mechanisms_that_the_model_can_leave_out():
    assert {
        "attn_res_full", "attn_res_none", "swiglu", "no_latent_norm", "no_router_norm", "mtp",
    } <= set(NAMES)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_differs_from_its_base_in_the_stated_fields_alone(name):
    cfg = load_recipe(str(FOLDER / f"{name}.py"))
    assert isinstance(cfg, RunConfig)
    stated = sorted(change.partition("=")[0] for change in recipe(name).CHANGES)
    changed = [line.partition(":")[0] for line in differences(recipe(name).BASE(), cfg)]
    assert changed == stated != []
    assert f"--config=configs/ablations/{name}.py" in recipe(name).__doc__


@pytest.mark.parametrize("name", NAMES)
def test_a_recipes_step_traces_at_the_least_size(name, rng):
    create, step = step_of(override(override(recipe(name).BASE(), LEAST), recipe(name).CHANGES))
    before = jax.eval_shape(create)
    after, measured = jax.eval_shape(step, before, (batch(rng),))
    shapes = [[leaf.shape for leaf in jax.tree.leaves(s)] for s in (before, after)]
    assert shapes[0] == shapes[1] and measured.loss.shape == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_takes_two_finite_steps_that_move_every_parameter(name, rng):
    create, step = step_of(override(override(recipe(name).BASE(), DEEPER), recipe(name).CHANGES))
    start, step = jax.jit(create)(), jax.jit(step)
    state, losses = start, []
    for _ in range(2):
        state, measured = step(state, (batch(rng),))
        losses.append(measured.loss)
        assert np.isfinite(measured.loss) and np.isfinite(measured.grad_norm)
        assert measured.mtp_loss is None or np.isfinite(measured.mtp_loss)
    assert abs(losses[0] - np.log(259)) < 1.0
    # The first read has a single source, so that its query has no gradient.
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(state.params),
        jax.tree.leaves(start.params),
        strict=True,
    ):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        assert np.any(a != b) or "layer_0/mixer_res" in name, name
