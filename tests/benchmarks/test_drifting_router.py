"""What the report claims of Quantile Balancing, on the synthetic router of the benchmark."""

import numpy as np
import pytest

from benchmarks import drifting_router

# Two numbers drawn from the sampling distribution lie within a factor of two of its usual maximum.
NEAR_FLOOR = 2.0


@pytest.mark.parametrize(
    "experts, top_k, tokens",
    [(64, 6, 4096), pytest.param(896, 16, 16384, marks=pytest.mark.slow)],
)
def test_quantile_balancing_reaches_the_sampling_floor_in_five_updates_and_the_sign_rule_does_not(
    experts, top_k, tokens
):
    rules = ("none", "sign 1e-2", "QB exact", "QB histogram")
    result = drifting_router.simulate(experts, top_k, tokens, 8, rules)
    violation = {name: np.array(v) for name, v in result["max_violation"].items()}
    floor = result["floor"]
    assert min(violation["none"]) > 20 * floor
    for name in ("QB exact", "QB histogram"):
        assert violation[name][0] == violation["none"][0]  # the first batch has no bias yet
        assert violation[name][5:].max() < NEAR_FLOOR * floor, name
    assert min(violation["sign 1e-2"]) > 10 * floor
    assert result["histogram_error_bins"] <= 1 + 1e-3


@pytest.mark.slow
def test_the_average_and_the_balancing_loss_arrive_too_but_later():
    rules = ("aux loss", "QB exact, EMA 0.5")
    result = drifting_router.simulate(16, 2, 2048, 40, rules)
    loss, average, exact = (
        np.array(result["max_violation"][name]) for name in (*rules, "QB exact")
    )
    assert exact[2] < average[2] < loss[2]
    assert average[10:].max() < 0.5 and loss[-1] < 0.5 * loss[0]


def test_the_floor_is_that_of_the_largest_of_n_counts():
    assert drifting_router.floor(896, 16, 16384) == pytest.approx(0.2156, abs=1e-4)
