"""The whole step: accumulation, and when the router bias may move."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import MODEL, largest_error, packed, same_bits, with_train

from k3jax.optim.optimizer import learning_rate, make_optimizer
from k3jax.train.config import RunConfig
from k3jax.train.evaluate import compiled_eval
from k3jax.train.feed import place
from k3jax.train.step import compiled_step, train_step

ROWS, LENGTH = 4, 64  # the shapes of `run_config`: its compiled step serves two test files


def make_batch(seed=0):
    """Four rows of packed documents with padding at the end of each."""
    rng = np.random.default_rng(seed)
    rows = [
        packed([rng.integers(0, 256, n) for n in lengths], LENGTH)
        for lengths in ([15, 29, 3], [60], [2, 2, 45], [17, 31])
    ]
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def split(batch, pieces=1):
    """Placed micro-batches."""
    parts = {name: np.split(value, pieces) for name, value in batch.items()}
    return tuple(place({n: p[i] for n, p in parts.items()}) for i in range(pieces))


def bias_of(state):
    return np.asarray(state.router["backbone"]["bias"])


@pytest.fixture(scope="module")
def step(run_config):
    return compiled_step(run_config.model, run_config.optimizer, run_config.train.steps)


def test_four_micro_batches_give_the_update_of_one(step, fresh, run_config):
    steps = run_config.train.steps
    tx, rate = (f(run_config.optimizer, steps) for f in (make_optimizer, learning_rate))
    in_pieces = jax.jit(train_step(MODEL, tx, rate))
    batch = make_batch()
    whole, of_whole = step(fresh(), split(batch, 1))
    parts, of_parts = in_pieces(fresh(), split(batch, 4))
    assert abs(of_whole.loss - of_parts.loss) < 1e-5
    assert abs(of_whole.grad_norm / of_parts.grad_norm - 1) < 1e-5
    assert of_whole.tokens == of_parts.tokens == np.sum(batch["segment_ids"] > 0)
    # AdamW's first update is lr * sign(g): where a gradient is rounding noise its sign may differ.
    # The first moments are the gradients themselves.
    assert largest_error(moments(whole), moments(parts)) < 1e-5
    # Integer counts and the same routing: equal bits.
    assert same_bits(whole.router, parts.router)
    assert np.array_equal(of_whole.dead_experts, of_parts.dead_experts)


def moments(state):
    """AdamW's first moments and Muon's momenta: after one step, multiples of the gradient."""
    leaves = jax.tree_util.tree_leaves_with_path(state.opt_state)
    kept = [leaf for path, leaf in leaves if ".mu[" in jax.tree_util.keystr(path)]
    assert len(kept) == len(jax.tree.leaves(state.params))
    return kept


def test_validation_between_two_steps_moves_nothing(step, fresh, run_config):
    evaluate = compiled_eval(run_config.model)
    skewed = place({**make_batch(), "tokens": np.full((ROWS, LENGTH), 7, np.int32)})
    states = []
    for validations in (0, 3):
        state, _ = step(fresh(), split(make_batch(0)))
        for _ in range(validations):
            evaluate(state.params, state.router, skewed)
        state, _ = step(state, split(make_batch(1)))
        states.append(jax.device_get(state))
    assert same_bits(*states)
    assert np.any(bias_of(states[0]))


def test_the_ids_at_padding_change_no_bit_of_the_step(step, fresh, rng):
    batch = make_batch()
    noisy = {name: value.copy() for name, value in batch.items()}
    padding = batch["segment_ids"] == 0
    for name in ("tokens", "targets"):
        noisy[name][padding] = rng.integers(0, 256, padding.sum())
    plain_state, plain = step(fresh(), split(batch))
    noisy_state, measured = step(fresh(), split(noisy))
    assert same_bits(plain_state.router, noisy_state.router)
    assert same_bits(plain_state.params, noisy_state.params)
    assert measured.loss == plain.loss and measured.tokens == plain.tokens


def test_a_batch_of_padding_leaves_bias_and_numbers_finite(step, fresh):
    state, _ = step(fresh(), split(make_batch()))
    before = bias_of(state)
    blank = {name: np.zeros_like(value) for name, value in make_batch().items()}
    after, measured = step(state, split(blank))
    assert measured.loss == 0 and measured.tokens == 0
    assert np.array_equal(bias_of(after), before)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(after.params))


def test_a_step_routes_with_the_bias_it_found_and_sets_the_next_one_once(step, fresh, run_config):
    batch = make_batch()
    state = fresh()
    nll, weight = compiled_eval(run_config.model)(state.params, state.router, place(batch))
    state, measured = step(state, split(batch))
    assert abs(nll / weight - measured.loss) < 1e-5
    bias = bias_of(state)
    assert bias.shape == (MODEL.moe_layers, MODEL.moe.experts) and np.any(bias)
    np.testing.assert_allclose(bias.mean(axis=-1), 0.0, atol=1e-6)
    assert state.step == 1


def test_a_constant_added_to_the_bias_changes_no_loss(step, fresh, run_config):
    evaluate, state, batch = compiled_eval(run_config.model), fresh(), place(make_batch())
    state, _ = step(state, split(make_batch()))
    shifted = jax.tree.map(lambda b: b + 0.25, state.router)
    before, _ = evaluate(state.params, state.router, batch)
    after, _ = evaluate(state.params, shifted, batch)
    assert before == after


def test_metrics_have_one_entry_per_moe_layer_and_the_rate_of_the_update(step, fresh, run_config):
    _, measured = step(fresh(), split(make_batch()))
    assert measured.max_violation.shape == measured.dead_experts.shape == (MODEL.moe_layers,)
    # A warm-up of 1 % of ten steps is one step, at the peak.
    assert float(measured.learning_rate) == pytest.approx(run_config.optimizer.peak_lr)
    assert float(measured.grad_norm) > 0


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"batch_size": 6, "micro_batches": 4}, "not a multiple"),
        ({"steps": 0}, "train.steps=0"),
        ({"checkpoint_every": -1}, "train.checkpoint_every=-1"),
    ],
)
def test_impossible_run_lengths_are_refused_by_name(run_config, changes, message):
    with pytest.raises(ValueError, match=message):
        with_train(run_config, **changes)


def test_token_ids_outside_the_embedding_are_refused(run_config):
    data = dataclasses.replace(run_config.data, vocab_size=4096)
    with pytest.raises(ValueError, match="data.vocab_size=4096 exceeds model.vocab_size=288"):
        RunConfig(run_config.model, run_config.optimizer, data, run_config.train)


def test_the_loss_of_an_untrained_model_is_that_of_a_guess(fresh, run_config):
    state = fresh()
    nll, weight = compiled_eval(run_config.model)(state.params, state.router, place(make_batch()))
    # A head of fan-in scale on normed states gives logits of variance 1, which cost 1/2 nat.
    assert abs(float(nll / weight) - (np.log(MODEL.vocab_size) + 0.5)) < 0.3
    assert jnp.isfinite(nll)
