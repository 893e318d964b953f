"""Runs entry points in this process, where importing JAX is already paid for."""

import importlib
import pathlib
import sys

import jax
import pytest
from absl import flags
from small_recipe import config

from k3jax.config import to_dict
from k3jax.data.tokenizer import Tokenizer
from k3jax.optim.optimizer import make_optimizer
from k3jax.parallel.mesh import make_mesh
from k3jax.train.checkpoint import Checkpoints
from k3jax.train.state import initial_state

RECIPE = pathlib.Path(__file__).with_name("small_recipe.py")


@pytest.fixture
def run_script(capsys):
    """(name, *arguments) -> (exit code, stdout, stderr) of experiments/<name>.py."""

    def run(name, *arguments):
        before = set(flags.FLAGS)
        sys.modules.pop(f"experiments.{name}", None)
        module = importlib.import_module(f"experiments.{name}")
        code = 0
        try:
            flags.FLAGS([name, *arguments])
            module.main([name])
        except SystemExit as stop:
            code = stop.code
        finally:
            # Two scripts may define the same flag; here they follow each other in one process.
            for flag in set(flags.FLAGS) - before:
                delattr(flags.FLAGS, flag)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A workdir with the untrained recipe as step 1, tokenizer of bytes."""
    workdir, cfg, tokenizer = tmp_path_factory.mktemp("run"), config(), Tokenizer([])
    records = {
        "config": to_dict(cfg),
        "tokenizer": {"fingerprint": tokenizer.fingerprint, "merges": tokenizer.merges},
    }
    with jax.set_mesh(make_mesh()):
        tx = make_optimizer(cfg.optimizer, cfg.train.steps)
        checkpoints = Checkpoints(workdir)
        checkpoints.save(1, initial_state(cfg.model, tx, 0), records)
        checkpoints.close()
    return workdir
