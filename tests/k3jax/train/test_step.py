"""The whole step: accumulation, and when the router bias may move."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import LENGTH, MODEL, ROWS, largest_error, packed, same_bits, with_train

from k3jax.models.kimi_k3.evaluate import compiled_eval
from k3jax.models.kimi_k3.loss import place
from k3jax.optim import quantile_balancing
from k3jax.optim.optimizer import global_norm
from k3jax.train.config import RunConfig
from k3jax.train.step import compiled_step

# The same sums over 256 tokens in pieces, through every layer: a hundred roundings of 6e-8.
PIECES = 1e-5
# A mean of 8 biases of order one, taken off in float32.
CENTRED = 1e-6


def make_batch(seed=0):
    """Four rows of packed documents with padding at the end of each."""
    rng = np.random.default_rng(seed)
    rows = ([15, 29, 3], [60], [2, 2, 45], [17, 31])
    return packed(*([rng.integers(0, 256, n) for n in lengths] for lengths in rows))


def split(batch):
    """The two placed micro-batches that `run_config` asks for."""
    parts = {name: np.split(value, 2) for name, value in batch.items()}
    return tuple(place({n: p[i] for n, p in parts.items()}) for i in range(2))


def bias_of(state):
    return np.asarray(state.router["backbone"]["bias"])


@pytest.fixture(scope="module")
def step(run_config):
    return compiled_step(run_config.model, run_config.optimizer, run_config.train.steps)


def test_two_micro_batches_give_loss_gradient_and_counts_of_the_whole_batch(
    step, fresh, whole_gradient
):
    batch = make_batch()
    (loss, stats), grads = whole_gradient(fresh(), batch)
    state, measured = step(fresh(), split(batch))
    assert abs(measured.loss - loss) < PIECES
    assert abs(measured.grad_norm / global_norm(grads) - 1) < PIECES
    assert measured.tokens == np.sum(batch["segment_ids"] > 0)
    # After one step AdamW's first moment is 0.1 of the clipped gradient and Muon's all of it.
    clip = min(1.0, 1.0 / float(measured.grad_norm))
    for name, share in (("adamw", 0.1), ("muon", 1.0)):
        moments = first_moments(state, name)
        expected = {p: share * clip * g for p, g in by_path(grads).items() if p in moments}
        assert len(moments) > 10 and largest_error(moments, expected) < PIECES
    # Integer counts and the same routing: the bias has the same bits.
    expected = quantile_balancing.bias_from_histogram(
        stats.histogram, stats.low, stats.width, fresh().router["backbone"]["bias"],
        MODEL.moe.top_k,
    )  # fmt: skip
    assert np.array_equal(bias_of(state), expected)
    assert np.array_equal(measured.dead_experts, quantile_balancing.dead_experts(stats.load))


def by_path(tree, cut="", within=""):
    """Leaves by path; only paths that hold `within`, without what stands up to `cut`."""
    paths = [(jax.tree_util.keystr(p), x) for p, x in jax.tree_util.tree_leaves_with_path(tree)]
    return {p.rpartition(cut)[2] if cut else p: x for p, x in paths if within in p and cut in p}


def first_moments(state, group):
    """The optimizer's first moments of one group, by parameter path."""
    return by_path(state.opt_state, cut=".mu", within=f"[1].inner_states['{group}']")


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
    assert abs(nll / weight - measured.loss) < PIECES
    bias = bias_of(state)
    assert bias.shape == (MODEL.moe_layers, MODEL.moe.experts) and np.any(bias)
    np.testing.assert_allclose(bias.mean(axis=-1), 0.0, atol=CENTRED)
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
    # A head of fan-in scale on normed states gives logits of variance 1, which cost 1/2 nat; over
    # 195 targets their mean has a deviation below 0.1.
    assert abs(float(nll / weight) - (np.log(MODEL.vocab_size) + 0.5)) < 0.3
    assert jnp.isfinite(nll)
