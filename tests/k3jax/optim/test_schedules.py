"""The learning rate depends on the step alone."""

import math

import jax
import numpy as np
import pytest

from k3jax.optim.schedules import make_schedule, share_of_steps


def test_the_cosine_rises_over_one_percent_and_ends_at_the_minimum():
    rate = make_schedule("cosine", 2.0, 1000, 0.01, 0.1)
    values = np.asarray(jax.vmap(rate)(np.arange(1100)))
    # float32: 1e-6 relative
    np.testing.assert_allclose(values[:10], 2.0 * np.arange(1, 11) / 10, rtol=1e-6)
    half = 2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi * 495 / 990)) / 2)
    np.testing.assert_allclose(values[504], half, rtol=1e-5)
    np.testing.assert_allclose(values[999:], 0.2, rtol=1e-6)
    assert (np.diff(values[9:1000]) <= 0).all() and values.max() == values[9] == 2.0


def test_the_constant_schedule_stays_at_the_peak_after_the_warm_up():
    rate = make_schedule("constant", 2.0, 100, 0.05, 0.1)
    values = np.asarray(jax.vmap(rate)(np.arange(100)))
    np.testing.assert_allclose(values[:5], 2.0 * np.arange(1, 6) / 5, rtol=1e-6)
    assert (values[5:] == 2.0).all()


def test_wsd_holds_the_peak_and_falls_by_the_root_over_its_last_share_of_steps():
    rate = make_schedule("wsd", 2.0, 1000, 0.01, 0.1, 0.2)
    values = np.asarray(jax.vmap(rate)(np.arange(1100)))
    np.testing.assert_allclose(values[:10], 2.0 * np.arange(1, 11) / 10, rtol=1e-6)
    assert (values[9:800] == 2.0).all() and values[800] < 2.0
    left = np.sqrt(np.arange(1, 201) / 200)
    np.testing.assert_allclose(values[800:1000], 2.0 * (0.1 + 0.9 * (1 - left)), rtol=1e-5)
    np.testing.assert_allclose(values[999:], 0.2, rtol=1e-6)


@pytest.mark.parametrize("fraction, first", [(0.0, 99), (0.02, 98), (1.0, 5)])
def test_the_decay_of_wsd_has_at_least_one_step_and_never_cuts_the_warm_up(fraction, first):
    values = np.asarray(
        jax.vmap(make_schedule("wsd", 1.0, 100, 0.05, 0.0, fraction))(np.arange(100))
    )
    np.testing.assert_allclose(values[:5], np.arange(1, 6) / 5, rtol=1e-6)
    assert (values[4:first] == 1).all() and values[first] < 1 and values[-1] == 0


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
@pytest.mark.parametrize("total", [1, 2, 3, 50])
def test_short_runs_warm_up_for_one_step_and_never_have_a_zero_first_rate(total, kind):
    assert share_of_steps(total, 0.01) == 1
    rate = make_schedule(kind, 1.0, total, 0.01, 0.0)
    assert float(rate(0)) == 1.0
    assert np.isfinite([float(rate(s)) for s in range(total + 2)]).all()


def test_a_run_without_steps_is_refused():
    with pytest.raises(ValueError, match="total_steps=0: a schedule needs at least one step"):
        make_schedule("cosine", 1.0, 0, 0.01, 0.0)


def test_an_unknown_schedule_is_refused_and_does_not_train_at_a_constant_rate():
    with pytest.raises(ValueError, match="schedule='linear': choose from cosine, wsd, constant"):
        make_schedule("linear", 1.0, 10, 0.01, 0.0)
