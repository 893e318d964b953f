"""Whole runs: resuming bit for bit, what a workdir holds, and what is refused."""

import dataclasses
import json
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import same_bits, with_train

from k3jax.optim.optimizer import make_optimizer
from k3jax.train import loop
from k3jax.train.checkpoint import Checkpoints
from k3jax.train.divergence import DivergedError
from k3jax.train.metrics import read_records
from k3jax.train.state import create_state

CLOCK = ("seconds", "tokens_per_second", "utilisation")  # all that two equal runs may differ in


def run(cfg, workdir, **options):
    lines = []
    result = loop.train(cfg, workdir, log=lines.append, **options)
    return result, "\n".join(lines)


def metrics(workdir):
    records = read_records(workdir / "metrics.jsonl")
    return [{k: v for k, v in record.items() if k not in CLOCK} for record in records]


def last_state(cfg, workdir):
    checkpoints = Checkpoints(workdir)
    tx = make_optimizer(cfg.optimizer, cfg.train.steps)
    abstract = jax.eval_shape(lambda: create_state(cfg.model, tx, 0))
    state = checkpoints.restore(checkpoints.latest(), abstract)
    checkpoints.close()
    return state


@pytest.fixture(scope="module")
def straight(run_config, tmp_path_factory):
    """(workdir, result, console) of ten steps without a stop."""
    workdir = tmp_path_factory.mktemp("straight")
    return workdir, *run(run_config, workdir)


@pytest.fixture(scope="module")
def resumed(run_config, tmp_path_factory):
    """The same in two halves."""
    workdir = tmp_path_factory.mktemp("resumed")
    assert run(run_config, workdir, until=5)[0] == {"step": 5}
    return workdir, *run(run_config, workdir)


def test_five_and_five_steps_equal_ten_bit_for_bit(run_config, straight, resumed):
    assert metrics(resumed[0]) == metrics(straight[0])
    a, b = last_state(run_config, straight[0]), last_state(run_config, resumed[0])
    assert a.step == 10 and same_bits(a, b)
    assert resumed[1] == straight[1]
    samples = [(d / "samples.txt").read_text() for d in (straight[0], resumed[0])]
    assert samples[0] == samples[1]
    assert "resumed" in resumed[2] and "at step 5 of 10" in resumed[2]


def test_no_batch_comes_twice_and_a_resumed_run_reads_the_same_ones(straight, resumed):
    batches = [
        [r["batch"] for r in metrics(d) if r["kind"] == "train"] for d, *_ in (straight, resumed)
    ]
    assert len(batches[0]) == len(set(batches[0])) == 10
    assert batches[0] == batches[1]


def test_a_run_learns_and_prints_its_bits_per_byte_beside_the_baselines(straight):
    workdir, result, console = straight
    losses = [r["loss"] for r in metrics(workdir) if r["kind"] == "train"]
    assert losses[-1] < losses[0] - 0.3
    table = console[console.index("bits per byte of") :]
    for row in ("uniform", "unigram", "gzip concatenated", "xz per document", "> this model"):
        assert row in table
    assert result == json.loads((workdir / "result.json").read_text())
    full = [r for r in metrics(workdir) if r.get("full")]
    assert [r["bits_per_byte"] for r in full] == [result["bits_per_byte"]]
    assert 0 < result["bits_per_byte"] < result["baselines"]["uniform"]


def test_a_workdir_holds_everything_a_reader_wants(straight):
    workdir, _, console = straight
    assert (workdir / "plot.png").read_bytes()[:4] == b"\x89PNG"
    assert "train.steps=10" in (workdir / "config.txt").read_text()
    table = (workdir / "parameters.txt").read_text()
    assert re.search(r"mixer/w_q +muon +decay .* 2 x \[32, 16\]", table)
    assert re.search(r"mixer/a_log +adamw +no decay", table)
    assert (workdir / "samples.txt").read_text().count("=== step") == 2
    assert sorted(p.name for p in (workdir / "checkpoints").iterdir()) == ["10", "5"]
    assert "eta" in console and "tok/s" in console and "max vio" in console


def test_starting_a_finished_run_again_changes_nothing(run_config, straight):
    workdir, result, _ = straight
    before = metrics(workdir)
    again, _ = run(run_config, workdir)
    assert again == result and metrics(workdir) == before


def test_what_only_prints_may_change_between_two_halves(run_config, straight, tmp_path):
    workdir = shutil.copytree(straight[0], tmp_path / "copy")
    result, _ = run(with_train(run_config, log_every=3, eval_every=2, keep=1), workdir)
    assert result == straight[1]


def test_another_configuration_is_refused_with_both_values(run_config, straight):
    optimizer = dataclasses.replace(run_config.optimizer, peak_lr=1e-3)
    other = dataclasses.replace(run_config, optimizer=optimizer)
    with pytest.raises(ValueError, match=r"optimizer.peak_lr: 0.003 != 0.001.*--workdir"):
        run(other, straight[0])


def test_a_changed_file_of_the_corpus_is_refused_by_name(run_config, tmp_path):
    source = shutil.copytree(run_config.data.source, tmp_path / "texts")
    data = dataclasses.replace(run_config.data, source=str(source))
    cfg = dataclasses.replace(run_config, data=data)
    run(cfg, tmp_path / "run", until=1)
    changed = pathlib.Path(source) / "07.txt"
    changed.write_text(changed.read_text() + "\none more line")
    with pytest.raises(ValueError, match=r"07\.txt.*has changed"):
        run(cfg, tmp_path / "run")


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step(
    run_config, tmp_path, monkeypatch
):
    compiled = loop.compiled_step

    def poisoned(*args):
        update = compiled(*args)

        def step(state, pieces):
            state, measured = update(state, pieces)
            bad = jnp.where(state.step == 7, jnp.nan, measured.loss)
            return state, measured._replace(loss=bad)

        return step

    monkeypatch.setattr(loop, "compiled_step", poisoned)
    with pytest.raises(DivergedError, match=r"loss is nan at step 7.*checkpoint.*step 5"):
        run(run_config, tmp_path)
    assert [r["step"] for r in metrics(tmp_path) if r["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["5"]


def test_the_recall_task_needs_no_text(run_config, tmp_path):
    cfg = with_train(run_config, task="recall", sample_every=0)
    result, console = run(cfg, tmp_path)
    assert set(result) == {"step", "loss", "tokens"}
    assert "bits per byte" not in console and not (tmp_path / "samples.txt").exists()
    losses = [r["loss"] for r in metrics(tmp_path) if r["kind"] == "train"]
    assert len(losses) == cfg.train.steps
    queries = (cfg.data.sequence_length - 1) // 2 - cfg.train.recall_pairs  # of a row
    assert result["tokens"] == cfg.train.eval_batches * cfg.train.eval_batch_size * queries
    # Only answers count. Untrained, one costs ln(ids) + 1/2 nat: logits have variance 1, and the
    # mean over the answers of 4 x 8 pairs a deviation of 1/5.
    assert abs(losses[0] - (np.log(cfg.model.vocab_size) + 0.5)) < 1.0


def test_train_and_validation_in_turns_leave_no_arrays_behind(run_config, tmp_path, monkeypatch):
    alive, evaluate = [], loop.evaluate

    def counted(*args):
        alive.append(len(jax.live_arrays()))
        return evaluate(*args)

    monkeypatch.setattr(loop, "evaluate", counted)
    cfg = with_train(run_config, eval_every=1, sample_every=0, checkpoint_every=0)
    run(cfg, tmp_path)
    assert len(alive) == 11
    assert len(set(alive[1:9])) == 1  # the last ones lack the batch of a next step
