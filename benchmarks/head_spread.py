"""Update sizes of heads on real gradients: `python benchmarks/head_spread.py`.

Trains the recall recipe with eight heads, and at some steps gives the gradient of a fresh batch to
Per-Head Muon and to Muon on whole matrices. Reported is the largest over the smallest root mean
square of a head's update within one matrix of Q, K or V, over all such matrices of the model.
"""

import dataclasses
import json
import pathlib
import statistics
import sys

import jax
import numpy as np
from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks.environment import environment
from k3jax import config
from k3jax.models.kimi_k3.loss import forward_nll, total_weight
from k3jax.optim import muon, optimizer
from k3jax.parallel import host
from k3jax.parallel.mesh import make_mesh
from k3jax.train.feed import Feed
from k3jax.train.state import initial_state
from k3jax.train.step import compiled_step, run_optimizer
from k3jax.train.task import make_task

CONFIG = flags.DEFINE_string("config", "configs/debug.py", "Recipe file.")
OUTPUT = flags.DEFINE_string("output", "benchmarks/results/head_spread_cpu.json", "Result file.")
HEADS = 8
AT_STEPS = (0, 50, 300)


def spreads(cfg: optimizer.OptimizerConfig, grads: dict) -> list[float]:
    """max / min over heads of the RMS of the first update, of every layer's Q, K and V."""
    plain = dataclasses.replace(cfg, schedule="constant", weight_decay=0.0)
    tx = optimizer.make_optimizer(plain, 1)
    zero = jax.tree.map(lambda g: 0 * g, grads)
    updates, _ = jax.jit(tx.update)(grads, tx.init(zero), zero)
    found = []
    for path, update in jax.tree_util.tree_leaves_with_path(jax.device_get(updates)):
        if muon.rule_of(optimizer.OptimizerConfig(1.0).rules, path, update) is muon.PER_HEAD:
            for layer in update:  # [D, H, K]
                rms = np.sqrt(np.mean(np.square(layer), axis=(0, 2)))
                found.append(float(rms.max() / rms.min()))
    return found


def measure(recipe) -> dict:
    """Spreads by step and rule: largest, median and smallest over matrices."""
    model = recipe.model
    kda = dataclasses.replace(model.kda, heads=HEADS)
    mla = dataclasses.replace(model.mla, heads=HEADS)
    model = dataclasses.replace(model, kda=kda, mla=mla)
    recipe = dataclasses.replace(recipe, model=model)
    update = compiled_step(model, recipe.optimizer, recipe.train.steps)
    state = initial_state(model, run_optimizer(recipe.optimizer, recipe.train.steps), 0)
    feed = Feed(make_task(recipe, lambda line: None).batches, 1)

    @jax.jit
    def gradient(params, router, batch):
        def loss(params):
            nll, _ = forward_nll(model, params, router, batch, train=False)
            return nll / total_weight(batch)

        return jax.grad(loss)(params)

    result = {}
    for step in range(max(AT_STEPS) + 1):
        pieces = feed.take()[0]
        if step in AT_STEPS:
            grads = gradient(state.params, state.router, pieces[0])
            for per_head in (True, False):
                cfg = dataclasses.replace(recipe.optimizer, per_head=per_head)
                values = spreads(cfg, grads)
                name = "per head" if per_head else "whole matrix"
                result.setdefault(name, {})[str(step)] = {
                    "largest": max(values), "median": statistics.median(values),
                    "smallest": min(values),
                }  # fmt: skip
        state, _ = update(state, pieces)
    return result


def main(argv):
    """Measures, then writes the result."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}; write flags as --name=value")
    host.prepare()
    with jax.set_mesh(make_mesh()):
        values = measure(config.load_recipe(CONFIG.value))
    output = pathlib.Path(OUTPUT.value)
    output.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**environment(sys.argv), "heads": HEADS, **values}, indent=1)
    output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    app.run(main)
