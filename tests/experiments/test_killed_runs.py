"""SIGKILL at any moment: the run that goes on equals the one that nobody stopped, bit for bit."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from small_recipe import config

from k3jax.train.checkpoint import find_step, load_arrays, read_records
from k3jax.train.metrics import read_records as read_metrics
from k3jax.train.state import create_state
from k3jax.train.step import run_optimizer

ROOT = pathlib.Path(__file__).parents[2]
RECIPE = pathlib.Path(__file__).with_name("small_recipe.py")
CLOCK = ("seconds", "tokens_per_second", "utilisation")
STEPS = 40


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """(workdir) -> the training process, writing a checkpoint at every second step."""
    texts, cache = tmp_path_factory.mktemp("texts"), tmp_path_factory.mktemp("cache")
    words = "state decay gate router expert token value query layer block norm head".split()
    draw = random.Random(0)
    for index in range(12):
        (texts / f"{index}.txt").write_text(" ".join(draw.choices(words, k=400)))
    fields = {
        "data.source": texts, "data.cache_dir": cache, "data.validation_fraction": 0.2,
        "train.steps": STEPS, "train.checkpoint_every": 2, "train.eval_every": 8,
        "train.sample_every": 0, "train.log_every": 5,
    }  # fmt: skip
    # Every start compiles the same programs: they are kept on disk, or starting would be all.
    flags = "--xla_backend_optimization_level=0"
    environment = {
        **os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags,
        "JAX_COMPILATION_CACHE_DIR": str(cache / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }  # fmt: skip

    def run(workdir):
        command = [sys.executable, "experiments/train.py", f"--config={RECIPE}"]
        command += [f"--workdir={workdir}", *(f"--set={k}={v}" for k, v in fields.items())]
        log = (workdir.parent / f"{workdir.name}.log").open("a")
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)

    return run


@pytest.fixture(scope="module")
def straight(start, tmp_path_factory):
    """Workdir of the run that nobody stops."""
    workdir = tmp_path_factory.mktemp("straight") / "run"
    assert start(workdir).wait(timeout=600) == 0
    return workdir


def wait_for(happened, process):
    """Polls until `happened()`; returns False when the process has ended before."""
    while process.poll() is None:
        if happened():
            return True
        time.sleep(0.001)
    return False


def last_step(workdir):
    return max((r["step"] for r in read_metrics(workdir / "metrics.jsonl")), default=0)


def kill_in_a_step(process, workdir, draw):
    """Between two records, a few steps after the start of this process."""
    first = wait_for(lambda: last_step(workdir) > 0, process) and last_step(workdir)
    target = first + draw.randint(1, 8)
    wait_for(lambda: last_step(workdir) >= target, process)
    time.sleep(draw.uniform(0, 0.03))
    process.send_signal(signal.SIGKILL)


def kill_in_a_write(process, workdir, draw):
    """While a step's folder still has its temporary name."""
    torn = "checkpoints/*tmp*"
    wait_for(lambda: last_step(workdir) > 0, process)
    for _ in range(draw.randint(1, 4)):
        wait_for(lambda: not list(workdir.glob(torn)), process)
        wait_for(lambda: list(workdir.glob(torn)), process)
    time.sleep(draw.uniform(0, 0.01))
    process.send_signal(signal.SIGKILL)


def check_equal(a, b):
    """Parameters, optimizer, bias, data position, metrics and result of two workdirs."""
    cfg = config()
    tx = run_optimizer(cfg.optimizer, STEPS)
    state = jax.eval_shape(lambda: create_state(cfg.model, tx, 0))
    parts = {"params": state.params, "router": state.router, "optimizer": state.opt_state}
    arrays = [jax.tree.leaves(load_arrays(find_step(d), parts)) for d in (a, b)]
    assert all(np.array_equal(x, y) for x, y in zip(*arrays, strict=True))
    assert read_records(a)["data"] == read_records(b)["data"]
    metrics = [
        [{k: v for k, v in r.items() if k not in CLOCK} for r in read_metrics(d / "metrics.jsonl")]
        for d in (a, b)
    ]
    # A record a step, two at each validation (sums and loads), and the whole validation.
    assert metrics[0] == metrics[1] and len(metrics[0]) == STEPS + 2 * (STEPS // 8) + 1
    assert json.loads((a / "result.json").read_text()) == json.loads(
        (b / "result.json").read_text()
    )


def killed_and_resumed(start, workdir, kills, seed):
    """Runs to the end through `kills` kills, in turn inside a step and inside a write.

    Returns the number of processes that were killed before their end, and of torn writes left.
    """
    draw, died, torn = random.Random(seed), 0, 0
    for number in range(kills):
        process = start(workdir)
        (kill_in_a_write if number % 2 else kill_in_a_step)(process, workdir, draw)
        died += process.wait(timeout=600) == -signal.SIGKILL
        torn += bool(list(workdir.glob("checkpoints/*tmp*")))
    assert start(workdir).wait(timeout=600) == 0
    return died, torn


def test_a_run_killed_in_a_step_and_in_a_write_equals_the_straight_one(start, straight, tmp_path):
    died, _ = killed_and_resumed(start, tmp_path / "run", 2, seed=1)
    assert died == 2
    check_equal(straight, tmp_path / "run")


@pytest.mark.slow
def test_twenty_kills_at_random_moments_leave_the_straight_run(start, straight, tmp_path):
    died = torn = 0
    for seed in range(5):
        workdir = tmp_path / f"run_{seed}"
        found = killed_and_resumed(start, workdir, 4, seed)
        died, torn = died + found[0], torn + found[1]
        check_equal(straight, workdir)
    assert died == 20
    assert torn >= 3  # kills did hit writes
