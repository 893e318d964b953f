"""The first-steps benchmark, on the smallest model there is."""

import itertools
import math

import jax
import numpy as np
import pytest

from benchmarks import step_timing
from configs import debug
from k3jax.config import override
from k3jax.models.kimi_k3 import counting

SIZES = "train.batch_size=2 data.sequence_length=16 train.recall_pairs=2 train.eval_batch_size=1"


@pytest.fixture(scope="module")
def cfg():
    layers = ["model.num_layers=1", "model.mla_layers=0", "model.dense_layers=1"]
    return override(debug.config(), [*SIZES.split(), *layers])


def test_synthetic_tokens_are_whole_rows_of_small_ids_most_of_all():
    batch = next(step_timing.SyntheticTokens(100, 8, 64, seed=1))
    tokens, targets = batch["tokens"], batch["targets"]
    assert tokens.shape == (8, 64) and tokens.dtype == np.int32
    assert 1 <= tokens.min() and tokens.max() < 100
    assert (tokens[:, 1:] == targets[:, :-1]).all() and batch["weights"].all()
    assert 0.4 < (tokens < 10).mean() < 0.6  # ids below √V have half the weight
    again = next(step_timing.SyntheticTokens(100, 8, 64, seed=1))
    assert (again["tokens"] == tokens).all()


@pytest.mark.parametrize("kind", ["synthetic", "task"])
def test_every_kind_of_data_has_the_recipes_batch(cfg, kind):
    batch = next(step_timing.source(cfg, kind))
    assert batch["tokens"].shape == (2, 16)


def test_unknown_data_and_too_few_steps_are_refused(cfg):
    with pytest.raises(ValueError, match="'web': choose synthetic or task"):
        step_timing.source(cfg, "web")
    with pytest.raises(ValueError, match="steps=3: the first is not timed"):
        step_timing.measure(cfg, step_timing.source(cfg, "synthetic"), 3)


def test_the_measured_run_counts_its_steps_and_tokens_by_the_clock(cfg):
    ticks = itertools.count()  # every look at the clock is a second later: each step takes one
    batches = step_timing.source(cfg, "synthetic")
    found = step_timing.measure(cfg, batches, 4, clock=lambda: float(next(ticks)))
    assert found["seconds"] == {"initialise": 1.0, "trace": 1.0, "compile": 1.0}
    assert found["step_seconds"] == {"median": 1.0, "quartiles": [1.0, 1.0]} and found["steps"] == 4
    assert found["tokens_per_second"] == 32
    assert found["flops_per_token"] == counting.flops_per_token(cfg.model, 16)
    share = 32 * found["flops_per_token"] / found["peak_flops"]["each"]
    assert found["utilisation"] == share and found["peak_flops"]["devices"] == 1
    assert abs(found["losses"]["first"] - math.log(67)) < 0.5
    assert found["memory"]["planned_peak"] > found["memory"]["compiled_arguments"] > 0


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_run_whose_loss_is_not_finite_has_no_times(loss):
    assert step_timing.finite(2.5) == 2.5
    with pytest.raises(ValueError, match="the run diverged"):
        step_timing.finite(loss)


def test_a_device_kind_becomes_a_part_of_a_file_name():
    assert step_timing.device_name(jax.devices()[0]) == "cpu"
    h100 = type("Device", (), {"device_kind": "NVIDIA H100 80GB HBM3"})
    assert step_timing.device_name(h100()) == "nvidia_h100_80gb_hbm3"
