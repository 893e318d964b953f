"""Each balancing rule in whole steps: over all pieces of a batch, on every mesh, once a step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import MODEL, largest_error, packed, same_bits

from k3jax.layers import router
from k3jax.models.kimi_k3 import model
from k3jax.optim import quantile_balancing
from k3jax.parallel.mesh import MeshConfig, make_mesh
from k3jax.train import balance
from k3jax.train.feed import place
from k3jax.train.state import TrainState
from k3jax.train.step import train_step

# One layer of latent attention and experts.
ONE = dataclasses.replace(MODEL, num_layers=1, mla_layers=(0,), attn_res_block=None, dense_layers=0)
E, K = ONE.moe.experts, ONE.moe.top_k
# Sums over 200 tokens in pieces, through one layer: some roundings of 6e-8.
PIECES = 1e-5


def with_moe(**changes):
    return dataclasses.replace(ONE, moe=dataclasses.replace(ONE.moe, **changes))


class Keep:
    """Changes nothing and keeps the gradients as its state."""

    def update(self, grads, state, params=None):
        return jax.tree.map(jnp.zeros_like, grads), grads


@functools.cache
def step(cfg):
    return jax.jit(train_step(cfg, Keep(), lambda _: jnp.float32(0)))


@functools.cache
def variables():
    drawn = jax.jit(lambda key: model.init(ONE, key))(jax.random.key(0))
    drawn["router"]["backbone"]["bias"] = jnp.linspace(-0.02, 0.02, E)[None]
    return drawn


def start():
    v = variables()
    return TrainState(jnp.int32(0), v["params"], v["router"], v["params"], jnp.zeros(2, jnp.uint32))


def batch(seed=0):
    rng = np.random.default_rng(seed)
    rows = ([15, 29, 3], [60], [2, 2, 45], [17, 31])
    return packed(*([rng.integers(0, 256, n) for n in lengths] for lengths in rows))


def pieces(count):
    parts = {name: np.split(value, count) for name, value in batch().items()}
    return tuple(place({n: p[i] for n, p in parts.items()}) for i in range(count))


def bias_of(state):
    return np.asarray(state.router["backbone"]["bias"])


@functools.cache
def margins():
    """[E, tokens that count] required biases of the whole batch, ascending, and the loads."""
    run = jax.jit(
        lambda v, t, s: model.forward(with_moe(balancing="quantile"), v, t, s, train=True)
    )
    stats = run(variables(), batch()["tokens"], batch()["segment_ids"]).stats
    required = np.asarray(stats.required)[0][batch()["segment_ids"] > 0]
    return np.sort(required.T, axis=-1), np.asarray(stats.load)[0]


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_exact_rule_takes_the_order_statistic_over_all_pieces_of_the_step(count):
    required, _ = margins()
    m = required.shape[1]
    assert m == 204 and np.all(np.isfinite(required))
    expected = required[:, m * K // E] - np.mean(required[:, m * K // E])
    state, _ = step(with_moe(balancing="quantile"))(start(), pieces(count))
    # Differences of scores below one.
    np.testing.assert_allclose(bias_of(state)[0], expected, atol=1e-6)


@pytest.mark.slow
def test_the_histogram_rule_is_within_one_bin_of_the_exact_one_in_a_step():
    exact, _ = step(with_moe(balancing="quantile"))(start(), pieces(1))
    binned, _ = step(with_moe(balancing="histogram"))(start(), pieces(1))
    width = (0.04 + 2) / ONE.moe.histogram_bins
    # Each estimate by one bin, and their mean over experts by one bin too.
    assert 0 < np.abs(bias_of(exact) - bias_of(binned)).max() < 2 * width


@pytest.mark.slow
def test_the_sign_rule_moves_by_its_rate_and_no_rule_moves_nothing():
    _, load = margins()
    moved = 0.01 * np.sign(load.mean() - load)
    signed, measured = step(with_moe(balancing="sign", balancing_rate=0.01))(start(), pieces(2))
    expected = bias_of(start())[0] + moved - np.mean(moved)
    np.testing.assert_allclose(bias_of(signed)[0], expected, atol=1e-7)
    np.testing.assert_allclose(measured.max_violation, load.max() / load.mean() - 1, rtol=1e-6)
    none, measured_none = step(with_moe(balancing="none"))(start(), pieces(2))
    assert same_bits(none.router, start().router)
    assert np.array_equal(measured_none.max_violation, measured.max_violation)
    assert measured.aux_loss is None and measured.max_logit is None


@functools.cache
def with_aux_loss(count, weight=0.5):
    cfg = with_moe(balancing="aux_loss", aux_loss_weight=weight)
    return step(cfg)(start(), pieces(count))


@pytest.mark.slow
def test_the_balancing_loss_is_the_switch_loss_of_the_whole_batch_and_no_part_of_the_loss():
    plain, measured = step(with_moe(balancing="none"))(start(), pieces(1))
    after, with_loss = with_aux_loss(1)
    assert with_loss.loss == measured.loss  # the reported loss stays comparable
    assert 0.5 < float(with_loss.aux_loss) < 0.55  # weight times 1 or little more
    assert same_bits(after.router, start().router)
    # The router feels it, the head does not: no path leads there.
    ours, theirs = after.opt_state, plain.opt_state
    routers = [g["backbone"]["block_0"]["group_0"]["layer_0"]["ffn"]["w_router"] for g in
               (ours, theirs)]  # fmt: skip
    assert largest_error(*routers) > 1e-3
    assert np.array_equal(ours["lm_head"], theirs["lm_head"])


@pytest.mark.slow
def test_four_pieces_give_the_gradient_of_the_balancing_loss_that_one_gives():
    """NVIDIA's Automodel#1412 scaled it by the number of pieces."""
    (one, whole), (four, parts) = with_aux_loss(1), with_aux_loss(4)
    assert abs(whole.aux_loss - parts.aux_loss) < PIECES
    assert largest_error(one.opt_state, four.opt_state) < PIECES


@pytest.mark.slow
@pytest.mark.parametrize("balancing", ["aux_loss", "quantile", "sign"])
def test_every_rule_gives_the_same_step_on_four_devices(balancing):
    cfg = with_moe(balancing=balancing, aux_loss_weight=0.5)
    expected, alone = step(cfg)(start(), pieces(1))
    host = jax.device_get(start())
    with jax.set_mesh(make_mesh(MeshConfig(data=2, expert=2))):
        like = jax.eval_shape(lambda: model.init(ONE, jax.random.key(0)))
        mesh = jax.sharding.get_mesh()
        put = lambda a, s: jax.device_put(a, jax.sharding.NamedSharding(mesh, s.sharding.spec))  # noqa: E731
        params = jax.tree.map(put, host.params, like["params"])
        routers = jax.tree.map(put, host.router, like["router"])
        state = TrainState(jnp.int32(0), params, routers, params, jnp.zeros(2, jnp.uint32))
        after, measured = jax.device_get(step(cfg)(state, pieces(1)))
    assert largest_error(after.opt_state, expected.opt_state) < PIECES
    assert largest_error(after.router, expected.router) < PIECES
    np.testing.assert_allclose(measured.max_violation, alone.max_violation, rtol=1e-6)
    if balancing == "aux_loss":
        np.testing.assert_allclose(measured.aux_loss, alone.aux_loss, rtol=PIECES)


@pytest.mark.parametrize("balancing", ["quantile", "histogram", "sign"])
def test_500_steps_with_empty_pieces_and_a_constant_expert_stay_finite(balancing):
    """marin#8033: histogram runs crashed in the middle of a sweep."""
    cfg = with_moe(balancing=balancing, histogram_bins=32, balancing_rate=0.01).moe

    @jax.jit
    def one_step(bias, key):
        x = jax.random.normal(key, (2, 24, 8), jnp.bfloat16)
        w = jnp.asarray(np.random.default_rng(0).normal(size=(8, E)), jnp.bfloat16)
        w = w.at[:, 3].set(0)  # a score of one half for every token
        # The second piece counts no token.
        counted = jnp.stack([jnp.ones(24, bool), jnp.zeros(24, bool)])
        stats = [
            router.statistics(router.route(x[i], w, bias[0], K), bias[0], counted[i], 32, balancing)
            for i in range(2)
        ]
        first, second = (jax.tree.map(lambda a: a[None], s) for s in stats)
        both = balance.add(first, second)
        empty = balance.add(second, second)
        if balancing == "quantile":
            both = both._replace(required=jnp.stack([first.required, second.required], axis=1))
        return balance.next_bias(cfg, bias, both), balance.next_bias(cfg, bias, empty), both

    bias = jnp.zeros((1, E))
    for key in jax.random.split(jax.random.key(0), 500):
        new, kept, stats = one_step(bias, key)
        assert np.array_equal(kept, bias)
        assert np.all(np.isfinite(new))
        if balancing == "histogram":
            assert stats.low[0] == pytest.approx(float(bias.min()) - 1, abs=1e-6)
            assert int(stats.histogram.sum()) == 24 * E
        bias = new
    assert abs(float(bias.mean())) < 1e-5 and float(jnp.abs(bias).max()) < 1.5


@pytest.mark.parametrize("rule", ["quantile", "histogram"])
def test_the_average_keeps_its_share_of_the_old_bias_and_none_changes_no_bit(rule, rng):
    cfg = with_moe(balancing=rule).moe
    scores = jax.nn.sigmoid(jnp.asarray(rng.normal(size=(40, E)), jnp.float32))
    bias = jnp.asarray(rng.normal(size=E), jnp.float32) * 0.1
    bias -= bias.mean()
    logits = jnp.log(scores) - jnp.log1p(-scores)
    r = router.route(logits, jnp.eye(E), bias, K)
    stats = router.statistics(r, bias, jnp.ones(40, bool), 64, rule)
    stats = jax.tree.map(lambda a: a[None], stats)
    new = balance.next_bias(cfg, bias[None], stats)
    for share in (0.5, 0.9):
        averaged = balance.next_bias(
            dataclasses.replace(cfg, balancing_ema=share), bias[None], stats
        )
        np.testing.assert_allclose(averaged, share * bias + (1 - share) * new, atol=1e-6)
    if rule == "quantile":
        np.testing.assert_allclose(
            new[0], quantile_balancing.exact_bias(scores, bias, K), atol=1e-6
        )


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"balancing": "loss"},
            "balancing='loss': choose from quantile, histogram, sign",
        ),
        ({"balancing_ema": 1.0}, r"balancing_ema=1.0: a share in \[0, 1\)"),
        ({"balancing": "sign", "balancing_ema": 0.5}, "balancing_ema=0.5 with .*'sign': only quan"),
        ({"balancing_rate": 0.0}, "balancing_rate=0.0: must be above 0"),
        ({"aux_loss_weight": -1.0}, "aux_loss_weight=-1.0: must be above 0; balancing=none"),
    ],
)
def test_a_rule_that_does_not_exist_or_cannot_act_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        with_moe(**changes)
