"""Scores of given tokens against log-probabilities taken from all logits."""

import jax
import numpy as np
import pytest
from small_runs import MODEL

from k3jax.eval.score import Pair, bucket, compiled_scores, score

# Sums of up to 40 terms of float32 log-probabilities near 6, in another order.
ROUNDING = dict(rtol=2e-5)


@pytest.fixture
def pairs(rng):
    """Contexts and continuations of every sort of length, one token included."""
    lengths = [(1, 1), (7, 3), (30, 1), (1, 40), (60, 9)]
    return [Pair(*(rng.integers(3, 288, n).tolist() for n in each)) for each in lengths]


def expected(log_probabilities, pair):
    ids = [*pair.context, *pair.continuation]
    table = log_probabilities(ids[:-1])[len(pair.context) - 1 :]
    return table[np.arange(len(pair.continuation)), pair.continuation].sum()


def test_a_score_is_the_sum_over_the_continuation_alone(variables, pairs, log_probabilities):
    found = score(MODEL, variables, pairs, 2)
    wanted = [expected(log_probabilities, pair) for pair in pairs]
    np.testing.assert_allclose([s.log_probability for s in found], wanted, **ROUNDING)


def test_a_pair_scores_the_same_alone_and_in_any_batch(variables, pairs):
    # 60 + 9 tokens make another bucket than the rest; 2 rows leave a batch half filled.
    together = score(MODEL, variables, pairs, 2)
    alone = [score(MODEL, variables, [pair], 2)[0] for pair in pairs]
    np.testing.assert_allclose(
        [s.log_probability for s in together], [s.log_probability for s in alone], **ROUNDING
    )
    assert [s.greedy for s in together] == [s.greedy for s in alone]


def test_a_continuation_is_greedy_when_every_token_is_the_argmax(variables, log_probabilities, rng):
    context = rng.integers(3, 288, 6).tolist()
    ids = list(context)
    for _ in range(4):
        ids.append(int(log_probabilities(ids)[-1].argmax()))
    best = ids[6:]
    wrong = [*best[:2], (best[2] + 1) % 288, best[3]]
    found = score(MODEL, variables, [Pair(context, best), Pair(context, wrong)], 2)
    assert [s.greedy for s in found] == [True, False]


def test_lengths_of_one_bucket_share_one_compilation(variables, rng):
    def compiled(*lengths):
        for length in lengths:
            score(MODEL, variables, [Pair([1], rng.integers(3, 288, length).tolist())], 2)
        return compiled_scores(MODEL)._cache_size()

    assert compiled(64, 128) == compiled(3, 20, 41, 63, 65, 100, 127)
    assert [bucket(n) for n in (1, 64, 65, 128, 129)] == [64, 64, 128, 128, 256]


def test_numbers_that_overflow_are_refused_with_their_place(variables, pairs):
    large = {"lm_head": 1e30, "final_norm": 1e20}
    params = {
        n: jax.tree.map(lambda a, n=n: a * large.get(n, 1.0), p)
        for n, p in variables["params"].items()
    }
    with pytest.raises(ValueError, match=r"-log p is (nan|inf) in pair 0 at position 0 \(token"):
        score(MODEL, {**variables, "params": params}, pairs, 2)


@pytest.mark.parametrize("pair", [Pair([], [5]), Pair([5], [])])
def test_a_pair_without_context_or_continuation_is_refused(variables, pair):
    with pytest.raises(ValueError, match="give at least one of each"):
        score(MODEL, variables, [pair], 2)


@pytest.mark.slow
def test_the_scores_of_two_devices_are_those_of_one(variables, pairs):
    found = score(MODEL, variables, pairs, 2)
    names = jax.sharding.get_mesh().axis_names
    mesh = jax.make_mesh((1, 2, 1, 1), names, devices=jax.devices()[:2])
    place = lambda x: jax.device_put(x, jax.sharding.NamedSharding(mesh, x.sharding.spec))  # noqa: E731
    with jax.set_mesh(mesh):
        split = score(MODEL, jax.tree.map(place, variables), pairs, 2)
    np.testing.assert_allclose(
        [s.log_probability for s in split], [s.log_probability for s in found], **ROUNDING
    )
