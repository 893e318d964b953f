"""Runs that are stopped, cannot save, cannot read, or meet numbers that are not finite."""

import dataclasses
import json
import math
import os
import pathlib
import resource
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import same_bits, with_train

from k3jax.models.kimi_k3 import huggingface
from k3jax.models.kimi_k3.loss import place
from k3jax.train import checkpoint, loop
from k3jax.train.checkpoint import Checkpoints, SaveError, load_arrays
from k3jax.train.config import resume_differences
from k3jax.train.divergence import MAX_SKIPPED, DivergedError, Watch, broken_leaves
from k3jax.train.initialise import load_weights, starting_tokenizer
from k3jax.train.interrupt import Interrupted
from k3jax.train.metrics import read_records
from k3jax.train.state import initial_state
from k3jax.train.step import compiled_step, run_optimizer

CLOCK = ("seconds", "tokens_per_second", "utilisation")


def run(cfg, workdir, log=None, **options):
    lines = []
    result = loop.train(cfg, workdir, log=log or lines.append, **options)
    return result, "\n".join(lines)


def metrics(workdir):
    records = read_records(workdir / "metrics.jsonl")
    return [{k: v for k, v in record.items() if k not in CLOCK} for record in records]


def arrays(cfg, workdir):
    with jax.set_mesh(loop.make_mesh()):
        tx = run_optimizer(cfg.optimizer, cfg.train.steps)
        state = jax.eval_shape(lambda: loop.create_state(cfg.model, tx, 0))
        parts = {"params": state.params, "router": state.router, "optimizer": state.opt_state}
        return load_arrays(workdir, parts)


@pytest.fixture(scope="module")
def cfg(run_config):
    """The run of the other files, without samples."""
    return with_train(run_config, sample_every=0)


@pytest.fixture(scope="module")
def straight(cfg, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("straight")
    run(cfg, workdir)
    return workdir


def signalled(step, number=signal.SIGTERM):
    """A console that sends this process a signal when it prints `step`."""
    lines = []

    def log(line):
        lines.append(line)
        if line.strip().startswith(f"step {step}/") or f"step  {step}/" in line:
            os.kill(os.getpid(), number)

    return log, lines


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_step_in_hand_and_the_run_goes_on_bit_for_bit(
    cfg, straight, tmp_path, number
):
    log, lines = signalled(3, number)
    with pytest.raises(Interrupted) as stop:
        run(cfg, tmp_path, log=log)
    assert stop.value.code == 128 + number and stop.value.step in (4, 5)
    assert Checkpoints(tmp_path).latest() == stop.value.step
    assert "stopped and saved at step" in lines[-1]
    run(cfg, tmp_path)
    assert metrics(tmp_path) == metrics(straight)
    assert same_bits(arrays(cfg, tmp_path), arrays(cfg, straight))


def test_a_full_disk_is_announced_and_the_next_checkpoint_is_written(cfg, straight, tmp_path):
    """The system refuses large files until the last step: the save of step 5 fails meanwhile."""
    lines, unlimited = [], (resource.RLIM_INFINITY, resource.RLIM_INFINITY)

    def log(line):
        lines.append(line)
        if "step  1/10" in line:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        if "step 10/10" in line:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)

    try:
        run(cfg, tmp_path, log=log)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    told = [line for line in lines if "could not be written" in line]
    assert len(told) == 1 and "step 10  warning: checkpoint of step 5" in told[0]
    assert "training goes on" in told[0]
    assert Checkpoints(tmp_path).steps() == [10]
    assert same_bits(arrays(cfg, tmp_path), arrays(cfg, straight))


def test_a_failed_save_does_not_hide_the_error_that_ends_a_run(cfg, tmp_path, poisoned):
    poisoned(7)
    lines, unlimited = [], (resource.RLIM_INFINITY, resource.RLIM_INFINITY)

    def log(line):
        lines.append(line)
        if "step  1/10" in line:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))

    try:
        with pytest.raises(DivergedError, match="at step 7.*newest checkpoint of this one: none"):
            run(cfg, tmp_path, log=log)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


def test_a_last_checkpoint_that_cannot_be_written_ends_the_run_with_the_reason(
    cfg, tmp_path, monkeypatch
):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: usage)
    lines = []
    with pytest.raises(SaveError, match=r"step 10 needs up to 0\.\d+ GB.*free some space"):
        run(cfg, tmp_path, log=lines.append)
    assert any("step 5  warning: checkpoint of step 5 needs" in line for line in lines)


def test_an_unreadable_newest_checkpoint_is_set_aside_and_the_one_before_is_used(
    cfg, straight, tmp_path
):
    workdir = shutil.copytree(straight, tmp_path / "copy")
    broken = workdir / "checkpoints" / "10"
    shutil.rmtree(broken / "params")
    (broken / "params").mkdir()
    _, console = run(cfg, workdir)
    assert "warning: checkpoint" in console and "going on from 5" in console
    assert "resumed" in console and "at step 5 of 10" in console
    names = sorted(p.name for p in (workdir / "checkpoints").iterdir())
    assert names == ["10", "10.unreadable", "5"]
    assert metrics(workdir) == metrics(straight)
    assert same_bits(arrays(cfg, workdir), arrays(cfg, straight))


def test_where_no_checkpoint_can_be_read_none_is_renamed(cfg, straight, tmp_path):
    workdir = shutil.copytree(straight, tmp_path / "copy")
    for step in ("5", "10"):
        (workdir / "checkpoints" / step / "params" / "_METADATA").write_text("{")
    with pytest.raises(checkpoint.CheckpointError, match="10' cannot be read"):
        run(cfg, workdir)
    assert sorted(p.name for p in (workdir / "checkpoints").iterdir()) == ["10", "5"]


def test_more_steps_need_the_flag_and_go_on_from_the_last_one(cfg, straight, tmp_path):
    workdir = shutil.copytree(straight, tmp_path / "copy")
    longer = with_train(cfg, steps=12)
    with pytest.raises(ValueError, match=r"train.steps: 10 != 12.*need train.extend=true"):
        run(longer, workdir)
    result, console = run(with_train(longer, extend=True), workdir)
    assert result["step"] == 12 and "at step 10 of 12" in console
    assert [r["step"] for r in metrics(workdir) if r["kind"] == "train"] == list(range(1, 13))
    assert metrics(workdir)[:10] == metrics(straight)[:10]


def test_fewer_steps_are_refused_even_with_the_flag(cfg, straight):
    with pytest.raises(ValueError, match="train.steps: 10 != 8"):
        run(with_train(cfg, steps=8, extend=True), straight)


def test_model_optimizer_data_and_seed_must_agree_and_mesh_and_cadence_need_not(cfg):
    old = loop.to_dict(cfg)
    changes = {
        "model": dataclasses.replace(cfg.model, norm_eps=1e-6),
        "optimizer": dataclasses.replace(cfg.optimizer, weight_decay=0.2),
        "data": dataclasses.replace(cfg.data, seed=1),
        "train": dataclasses.replace(cfg.train, seed=1),
    }
    for part, value in changes.items():
        refused, _ = resume_differences(old, dataclasses.replace(cfg, **{part: value}))
        assert len(refused) == 1 and refused[0].startswith(part)
    mesh = dataclasses.replace(cfg.train.mesh, data=2)
    free = with_train(cfg, mesh=mesh, log_every=7, checkpoint_every=1, keep=9)
    assert resume_differences(old, free) == ([], ["train.mesh.data: 1 != 2"])


@pytest.fixture
def poisoned(monkeypatch):
    """Steps -> makes the batches of these steps cost infinitely much, from now on."""
    made = loop.make_task

    def spoil(*steps):
        def make(*args):
            task = made(*args)
            draw = type(task.batches).__next__

            def following(batches):
                step = batches.get_state()["position"]["next_index"] + 1
                batch = draw(batches)
                if step in steps:
                    batch["weights"] = np.where(batch["weights"] > 0, np.inf, 0).astype(np.float32)
                return batch

            task.batches.__class__ = type("Spoilt", (type(task.batches),), {"__next__": following})
            return task

        monkeypatch.setattr(loop, "make_task", make)

    return spoil


def test_a_loss_that_is_not_finite_stops_with_a_report_of_its_documents(cfg, tmp_path, poisoned):
    poisoned(7)
    with pytest.raises(DivergedError, match=r"at step 7, documents .*\.txt.*newest.*step 5"):
        run(cfg, tmp_path)
    folder = tmp_path / "not_finite" / "step_7"
    report = json.loads((folder / "report.json").read_text())
    batch = np.load(folder / "batch.npz")
    assert report["reason"] == "loss is nan" and report["loss"] is None
    assert report["step"] == 7 and len(report["documents"]) == cfg.train.batch_size
    assert all(row and row[0].endswith(".txt") for row in report["documents"])
    assert batch["tokens"].shape == (cfg.train.batch_size, cfg.data.sequence_length)
    assert np.isinf(batch["weights"]).any()
    assert Checkpoints(tmp_path).latest() == 5


def test_skipping_drops_the_update_says_so_and_learns_on(cfg, tmp_path, poisoned):
    poisoned(3, 7)
    _, console = run(with_train(cfg, not_finite="skip"), tmp_path)
    assert console.count("the update is skipped (1 in a row)") == 2
    assert not broken_leaves(arrays(cfg, tmp_path)["params"])
    losses = {r["step"]: r["loss"] for r in metrics(tmp_path) if r["kind"] == "train"}
    assert [s for s, loss in losses.items() if loss is None] == [3, 7]


def test_skipping_ends_after_ten_in_a_row(tmp_path):
    told = []
    watch = Watch(tmp_path, True, lambda: None, lambda batch: [[f"d{batch}"]], told.append)
    piece = [{"tokens": np.zeros((1, 2), np.int32)}]
    bad, good = ({"loss": loss, "grad_norm": 1.0} for loss in (math.nan, 1.0))
    for step in range(1, MAX_SKIPPED + 1):
        watch.check(step, bad, piece)
    watch.check(11, good, piece)
    for step in range(12, MAX_SKIPPED + 12):
        watch.check(step, bad, piece)
    assert len(told) == 2 * MAX_SKIPPED
    with pytest.raises(DivergedError, match="loss is nan at step 22, documents d21.*none"):
        watch.check(22, bad, piece)


def test_a_skipped_step_changes_counts_only(cfg, fresh):
    before = fresh()
    step = compiled_step(cfg.model, cfg.optimizer, cfg.train.steps, True)  # that of the run above
    shape = (cfg.train.batch_size // cfg.train.micro_batches, cfg.data.sequence_length)
    piece = {n: np.ones(shape, np.int32) for n in ("tokens", "targets", "segment_ids")}
    for bad, same in ((np.nan, True), (1.0, False)):
        pieces = [place({**piece, "weights": np.full(shape, bad, np.float32)})] * 2
        new, _ = step(fresh(), tuple(pieces))
        assert new.step == 1
        assert same_bits(new.params, before.params) == same
        assert same_bits(new.router, before.router) == same
        moments = [
            [leaf for leaf in jax.tree.leaves(s.opt_state) if leaf.ndim] for s in (new, before)
        ]
        assert same_bits(*moments) == same


def test_parameters_that_are_not_finite_are_never_saved(cfg, tmp_path, monkeypatch):
    compiled = loop.compiled_step

    def overflowing(*args):
        update = compiled(*args)

        def step(state, pieces):
            state, measured = update(state, pieces)
            scale = jnp.where(state.step == 5, jnp.inf, 1.0)
            params = {**state.params, "final_norm": state.params["final_norm"] * scale}
            return state._replace(params=params), measured

        return step

    monkeypatch.setattr(loop, "compiled_step", overflowing)
    with pytest.raises(DivergedError, match="1 parameters are not finite after step 5.*final_norm"):
        run(cfg, tmp_path)
    assert Checkpoints(tmp_path).latest() is None


def test_a_run_starts_from_the_weights_of_another_with_a_new_optimizer(cfg, straight, tmp_path):
    start = with_train(cfg, init_from=str(straight), steps=1, seed=5)
    with jax.set_mesh(loop.make_mesh()):
        task = loop.make_task(start, lambda _: None)
        checkpoints = Checkpoints(tmp_path)
        begun = loop.Run(start, tmp_path, task, checkpoints, lambda _: None)
        stored = arrays(cfg, straight)
        assert same_bits(begun.state.params, stored["params"])
        assert same_bits(begun.state.router, stored["router"])
        tx = run_optimizer(start.optimizer, 1)
        fresh_state = initial_state(start.model, tx, 5)
        assert same_bits(begun.state.opt_state, fresh_state.opt_state)
        assert same_bits(begun.state.key, fresh_state.key)
        begun.close()
        checkpoints.close()


def test_weights_of_another_shape_are_refused_by_name(cfg, straight, tmp_path):
    model = dataclasses.replace(cfg.model, dense_width=64)
    other = dataclasses.replace(with_train(cfg, init_from=str(straight)), model=model)
    with pytest.raises(ValueError, match=r"arrays do not fit, first .*w_down is \(1, 48, 32\)"):
        run(other, tmp_path)


def test_another_function_of_equal_shapes_is_announced(cfg, straight):
    told = []
    with jax.set_mesh(loop.make_mesh()):
        load_weights(str(straight), dataclasses.replace(cfg.model, norm_eps=1e-3), told.append)
        load_weights(str(straight), dataclasses.replace(cfg.model, remat=False), told.append)
    assert len(told) == 1 and "norm_eps: 1e-05 != 0.001" in told[0]


def test_a_released_layout_folder_gives_its_weights_and_no_tokenizer(cfg, tmp_path):
    folder = str(pathlib.Path(__file__).parents[2] / "golden" / "kimi_linear_tiny")
    told = []
    with jax.set_mesh(loop.make_mesh()):
        model, variables = huggingface.load(folder)
        half = dataclasses.replace(model, param_dtype="bfloat16")
        loaded = load_weights(folder, half, told.append)
        start = dataclasses.replace(with_train(cfg, init_from=folder), model=model)
        assert starting_tokenizer(start, tmp_path, told.append) is None
    rounded = jax.tree.map(lambda a, b: np.array_equal(a, b.astype(a.dtype)), loaded, variables)
    assert all(jax.tree.leaves(rounded))
    assert len(told) == 1 and "has no tokenizer of ours" in told[0]


def test_a_run_that_starts_from_weights_reads_text_with_their_tokenizer(cfg, straight, tmp_path):
    start, told = with_train(cfg, init_from=str(straight)), []
    with jax.set_mesh(loop.make_mesh()):
        tokenizer = starting_tokenizer(start, tmp_path, told.append)
        other = dataclasses.replace(cfg.data, vocab_size=270)  # would learn fewer merges itself
        task = loop.make_task(dataclasses.replace(start, data=other), told.append, tokenizer)
        own = loop.make_task(dataclasses.replace(cfg, data=other), told.append)
    stored = checkpoint.read_records(straight)["tokenizer"]
    assert task.tokenizer.fingerprint == stored["fingerprint"] != own.tokenizer.fingerprint
    # Once the run has a checkpoint of its own, the folder it started from may be gone.
    gone = with_train(cfg, init_from=str(tmp_path / "gone"))
    found = starting_tokenizer(gone, straight, told.append)
    assert found.fingerprint == stored["fingerprint"]
