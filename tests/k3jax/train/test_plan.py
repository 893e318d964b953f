"""The plan's bytes against placed arrays and against what XLA allocates for a compiled step."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from configs import debug
from k3jax.config import ConfigError, override
from k3jax.models.kimi_k3 import counting
from k3jax.parallel import specs
from k3jax.parallel.mesh import MeshConfig, make_mesh
from k3jax.train import plan
from k3jax.train.activations import local_bytes
from k3jax.train.state import create_state
from k3jax.train.step import compiled_step, run_optimizer
from k3jax.train.utilisation import GIB

SMALL = dataclasses.replace(debug.config(), model=dataclasses.replace(debug.MODEL, remat=True))


@pytest.fixture(scope="module")
def one_device():
    return plan.make_plan(SMALL, GIB)


def test_local_bytes_are_those_of_the_shards_on_one_device():
    with jax.set_mesh(make_mesh(MeshConfig(data=2, expert=2))):
        mesh = jax.sharding.get_mesh()
        arrays = [
            jax.device_put(jnp.zeros(shape, dtype), jax.sharding.NamedSharding(mesh, spec))
            for shape, dtype, spec in (
                ((8, 4), jnp.float32, specs.IN_MATRIX),
                ((4, 6, 2, 3), jnp.bfloat16, specs.EXPERT_IN),
                ((5,), jnp.int32, specs.VECTOR),
            )
        ]
    first = mesh.devices.flat[0]
    held = [s.data for a in arrays for s in a.addressable_shards if s.device == first]
    assert local_bytes(arrays) == sum(shard.nbytes for shard in held) == 32 + 72 + 20


def test_one_device_holds_every_leaf_and_its_moments_once(one_device):
    found, total = one_device.bytes, counting.total(SMALL.model)
    assert one_device.leaves == total and found.parameters == 4 * total
    moe = counting.parts(SMALL.model)["MoE, not routed"].copies
    trained = total - moe * SMALL.model.moe.experts
    assert found.gradients == found.update == 4 * trained
    assert 4 * trained < found.optimizer < 2 * 4 * trained


def test_a_mesh_divides_experts_and_leaves_vectors_whole(one_device):
    run = plan.adapt(SMALL, mesh="data=2,expert=4")
    parted, shape = plan.make_plan(run, GIB), {"data": 2, "expert": 4, "stage": 1, "context": 1}
    assert plan.values(parted)["mesh"] == shape
    assert parted.leaves == one_device.leaves
    experts = 4 * counting.parts(SMALL.model)["routed expert"].total
    whole, part = one_device.bytes.parameters, parted.bytes.parameters
    assert (whole - experts) / 8 + experts / 8 < part < whole - experts * 7 / 8
    assert parted.bytes.kept * 8 == one_device.bytes.kept


def test_activations_grow_with_rows_and_tokens_and_shrink_with_micro_batches(one_device):
    run = override(plan.adapt(SMALL, batch=128, sequence=128), ["train.micro_batches=2"])
    found = plan.make_plan(run, GIB)  # as many rows at once, each of four times the tokens
    assert found.bytes.kept == 4 * one_device.bytes.kept
    assert found.bytes.gradients == 2 * one_device.bytes.gradients
    assert found.tokens_per_step == 8 * one_device.tokens_per_step


def test_equal_blocks_are_traced_once_and_counted_as_often_as_they_stand():
    layers = "num_layers=9 mla_layers=1,3,5,7,8 dense_layers=1 attn_res_block=2".split()
    run = override(SMALL, [f"model.{layer}" for layer in layers])
    short, copies = plan.distinct_blocks(run.model)
    assert (short.num_layers, short.mla_layers, short.dense_layers) == (5, (1, 3, 4), 1)
    assert copies == {"block_0": 1, "block_1": 3, "block_2": 1, "bias": 2}
    found, tx = plan.make_plan(run, GIB), run_optimizer(run.optimizer, run.train.steps)
    state = jax.eval_shape(lambda: create_state(run.model, tx, 0))
    assert found.leaves == counting.total(run.model)
    assert found.bytes.parameters == local_bytes((state.params, state.router))
    assert found.bytes.optimizer == local_bytes(state.opt_state)


def test_remat_keeps_less_and_works_more(one_device):
    without = plan.make_plan(override(SMALL, ["model.remat=false"]), GIB).bytes
    assert one_device.bytes.kept < without.kept / 4
    assert one_device.bytes.working > without.working


def test_a_plan_fits_when_its_peak_is_within_the_memory(one_device):
    exact = dataclasses.replace(one_device, memory=one_device.bytes.peak)
    assert exact.fits and "fits: 100.0%" in plan.table(exact)
    less = dataclasses.replace(exact, memory=exact.memory - 1)
    assert not less.fits and "does not fit" in plan.table(less)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("data=3", "batch_size / micro_batches=64 cannot be split"),
        ("foo=2", "foo: no such field"),
        ("data=x", "expected an integer"),
        ("context=2", "train.mesh.context=2"),
        ("stage=2", "stage=2"),
    ],
)
def test_a_mesh_that_cannot_hold_the_run_is_refused(mesh, message):
    with pytest.raises(ConfigError, match=message):
        plan.adapt(SMALL, mesh=mesh)


def test_a_mesh_that_cannot_split_a_parameter_is_refused():
    run = plan.adapt(SMALL, ["train.batch_size=96"], mesh="data=32")
    with pytest.raises(ValueError, match="split over data x expert = 32 devices.*lower the mesh"):
        plan.make_plan(run, GIB)


def compiled_memory(run):
    """What XLA's CPU backend allocates for the run's training step."""
    split = jax.sharding.NamedSharding(jax.sharding.get_mesh(), specs.TOKENS)
    shape = (run.train.batch_size, run.data.sequence_length)
    column = lambda dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=split)  # noqa: E731
    batch = {name: column(jnp.int32) for name in ("tokens", "targets", "segment_ids")}
    tx = run_optimizer(run.optimizer, run.train.steps)
    state = jax.eval_shape(lambda: create_state(run.model, tx, 0))
    step = compiled_step(run.model, run.optimizer, run.train.steps)
    lowered = step.lower(state, (batch | {"weights": column(jnp.float32)},))
    return lowered.compile().memory_analysis()


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["true", "false"])
def test_the_estimated_peak_is_within_a_fifth_of_a_compiled_step(remat):
    # Four equal groups in a scan, and activations that outweigh the parameters. With the programs'
    # own XLA flags (jax 0.11.2) the estimate is 0.94 of what is allocated with remat, 0.96 without.
    sizes = "kda.key_dim=32 kda.value_dim=32 moe.expert_width=64 moe.latent_dim=64 hidden_size=128"
    depth = "num_layers=8 mla_layers=1,3,5,7 dense_layers=0 attn_res_block=8 vocab_size=512"
    fields = f"{sizes} {depth} unroll_layers=false remat={remat}".split()
    changes = [f"model.{field}" for field in fields]
    run = override(SMALL, [*changes, "train.batch_size=8", "data.sequence_length=512"])
    found, actual = plan.make_plan(run, GIB).bytes, compiled_memory(run)
    held = found.parameters + found.optimizer
    batch = 4 * 4 * run.train.batch_size * run.data.sequence_length
    assert 0 <= actual.argument_size_in_bytes - held - batch < 1024  # step, key and counts
    assert 0.8 < (found.peak - held) / actual.temp_size_in_bytes < 1.25
