"""The arms of the step benchmark compute one model and are told apart by name."""

import dataclasses
import types

import pytest

from benchmarks import step_comparison
from benchmarks.step_comparison import ARMS, EACH, OPS
from configs import debug, tiny


def test_an_arm_replaces_the_implementations_that_it_names_and_nothing_else():
    cfg = tiny.config()
    same, loss = step_comparison.with_references(cfg, ARMS["ours"])
    assert same == cfg and loss is None
    every, loss = step_comparison.with_references(cfg, ARMS["reference"])
    model = every.model
    assert loss == "reference" and len(EACH) == len(OPS)
    assert {model.kda.implementation, model.mla.implementation, model.moe.implementation} == {
        "reference"
    }
    back = {
        name: dataclasses.replace(getattr(model, name), implementation=None)
        for name in ("kda", "mla", "moe")
    }
    assert dataclasses.replace(every, model=dataclasses.replace(model, **back)) == cfg
    one, loss = step_comparison.with_references(cfg, ["experts"])
    assert one.model.moe.implementation == "reference" and loss is None
    assert one.model.kda == cfg.model.kda
    with pytest.raises(ValueError, match="op 'norm' is unknown"):
        step_comparison.with_references(cfg, ["norm"])


def test_rows_of_another_length_keep_the_tokens_of_a_batch():
    cfg = tiny.config()
    longer = step_comparison.with_row_length(cfg, 1024)
    assert (longer.train.batch_size, longer.data.sequence_length) == (2, 1024)
    assert step_comparison.with_row_length(cfg, 128) == cfg
    for length in (1, 100, 4096):
        with pytest.raises(ValueError, match=f"row length {length} does not divide"):
            step_comparison.with_row_length(cfg, length)


def test_arms_whose_first_losses_differ_are_refused():
    arm = lambda loss: types.SimpleNamespace(losses=[loss])  # noqa: E731
    step_comparison._check_same({"ours": arm(2.0), "reference": arm(2.0 + 1e-4)})
    for loss in (2.01, float("nan")):
        with pytest.raises(ValueError, match="do not compute one model"):
            step_comparison._check_same({"ours": arm(2.0), "reference": arm(loss)})


def test_fewer_rounds_than_quartiles_need_are_refused():
    with pytest.raises(ValueError, match="rounds=2"):
        step_comparison.compare(debug.config(), ARMS, rounds=2)
    assert step_comparison.spread([1.0, 2.0, 4.0]) == {"median": 2.0, "quartiles": [1.0, 4.0]}


@pytest.mark.slow
def test_every_arm_of_a_small_run_is_timed_on_the_same_batches():
    run = debug.config()
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, batch_size=4))
    lines = []
    found = step_comparison.compare(run, ARMS, rounds=3, warmup=1, log=lines.append)
    assert found["tokens_per_step"] == 4 * 31 and found["sequence_length"] == 32
    ours, reference = found["arms"]["ours"], found["arms"]["reference"]
    assert ours["times_slower"] == {"median": 1.0, "quartiles": [1.0, 1.0]}
    assert reference["reference_ops"] == list(OPS) and reference["compile_seconds"] > 0
    assert abs(ours["first_loss"] - reference["first_loss"]) < 1e-4
    for arm in (ours, reference):
        rate = found["tokens_per_step"] / arm["step_seconds"]["median"]
        assert arm["tokens_per_second"] == pytest.approx(rate)
    assert lines[-1].startswith("reference: ") and "tokens/s" in lines[-1]
