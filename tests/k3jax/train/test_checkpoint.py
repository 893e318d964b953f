"""Saving and loading: exactness, retention, meshes, and folders that are not checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from small_runs import same_bits

from k3jax.train.checkpoint import (
    CheckpointError,
    Checkpoints,
    find_step,
    load_arrays,
    read_records,
)
from k3jax.train.state import TrainState

RECORDS = {
    "data": {"epoch": 3, "position": [1, 2], "order": None},
    "config": {"train": {"steps": 7, "rate": 1e-3}},
    "manifest": {"files": {"a/é.py": "ab12"}},
    "tokenizer": {"json": "{}"},
}


def make_state(step, seed=0):
    """A small state with every kind of leaf: sharded, bfloat16, integer, empty tuple, nested."""
    key = jax.random.key(seed)
    w = jax.random.normal(key, (8, 4), out_sharding=P(("data", "expert"), None))
    return TrainState(
        step=jnp.int32(step),
        params={"w": w, "inner": {"b": jnp.arange(3, dtype=jnp.bfloat16)}},
        router={"backbone": {"bias": jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)}},
        opt_state=(jnp.int32(step), {"w": 2 * w}, ()),
        key=jax.random.key_data(key),
    )


def save_all(workdir, steps, **kept):
    checkpoints = Checkpoints(workdir, **kept)
    for step in steps:
        checkpoints.save(step, make_state(step, seed=step), RECORDS)
    checkpoints.close()


def test_a_state_and_its_records_come_back_bit_for_bit(tmp_path):
    save_all(tmp_path, [5])
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest() == 5
    restored = checkpoints.restore(5, jax.eval_shape(lambda: make_state(0)))
    assert same_bits(restored, make_state(5, seed=5))
    assert isinstance(restored, TrainState)
    assert read_records(tmp_path) == RECORDS
    checkpoints.close()


def test_a_checkpoint_moves_between_meshes_with_the_sharding_asked_for(tmp_path, mesh):
    axes = mesh.axis_names
    wide = jax.make_mesh((1, 4, 2, 1), axes, axis_types=(AxisType.Explicit,) * 4)
    with jax.set_mesh(wide):
        save_all(tmp_path, [1])
    expected = make_state(1, seed=1)
    narrow = jax.make_mesh(
        (1, 2, 1, 1), axes, axis_types=(AxisType.Explicit,) * 4, devices=jax.devices()[:2]
    )
    for target in (narrow, mesh):
        with jax.set_mesh(target):
            abstract = jax.eval_shape(lambda: make_state(0))
            restored = Checkpoints(tmp_path).restore(1, abstract)
            assert restored.params["w"].sharding.mesh == target
            assert restored.params["w"].sharding.spec == P(("data", "expert"), None)
            assert same_bits(jax.device_get(restored), jax.device_get(expected))


def test_only_the_newest_checkpoints_stay(tmp_path):
    save_all(tmp_path, [1, 2, 3, 4], keep=2)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["3", "4"]


def test_every_third_checkpoint_stays_besides_the_newest(tmp_path):
    save_all(tmp_path, range(1, 9), keep=1, keep_every=3)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["3", "6", "8"]


def test_saving_every_step_under_donation_stores_the_step_in_the_name(tmp_path):
    advance = jax.jit(
        lambda s: s._replace(step=s.step + 1, params=jax.tree.map(lambda a: a + 1, s.params)),
        donate_argnums=0,
    )
    checkpoints = Checkpoints(tmp_path, keep=20)
    state, seen = make_state(0), {}
    for step in range(1, 21):
        state = advance(state)
        checkpoints.save(step, state, RECORDS)
        seen[step] = np.array(state.params["w"])
    checkpoints.close()
    abstract = {"params": jax.eval_shape(lambda: make_state(0)).params}
    for step, w in seen.items():
        folder = tmp_path / "checkpoints" / str(step)
        assert np.array_equal(load_arrays(folder, abstract)["params"]["w"], w)


def test_parameters_load_without_the_optimizer(tmp_path):
    save_all(tmp_path, [2])
    abstract = jax.eval_shape(lambda: make_state(0))
    loaded = load_arrays(tmp_path, {"params": abstract.params})
    assert set(loaded) == {"params"} and same_bits(loaded["params"], make_state(2, seed=2).params)


def test_workdir_and_step_folder_both_name_a_checkpoint(tmp_path):
    save_all(tmp_path, [9, 10])
    steps = tmp_path / "checkpoints"
    assert find_step(tmp_path) == find_step(steps) == find_step(steps / "10") == steps / "10"
    assert find_step(steps / "9") == steps / "9"


def test_a_missing_folder_is_refused_with_what_is_there_instead(tmp_path):
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"runs/tinny' does not exist.*there is: tiny"):
        find_step(tmp_path / "runs" / "tinny")


def test_a_folder_without_checkpoints_is_refused_with_its_contents(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(CheckpointError, match="holds no checkpoint.*there is: notes.txt"):
        find_step(tmp_path)


def test_a_half_written_step_is_passed_over_and_removed(tmp_path):
    save_all(tmp_path, [1])
    torn = tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp-0"
    torn.mkdir()
    (torn / "params").mkdir()
    assert find_step(tmp_path).name == "1"
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest() == 1
    checkpoints.close()


def test_a_damaged_step_is_refused_in_one_line_that_names_the_others(tmp_path):
    save_all(tmp_path, [1, 2])
    (tmp_path / "checkpoints" / "2" / "params" / "_METADATA").write_text("{")
    abstract = jax.eval_shape(lambda: make_state(0))
    with pytest.raises(CheckpointError, match="cannot be read.*or use step 1") as refusal:
        load_arrays(tmp_path, {"params": abstract.params})
    assert "\n" not in str(refusal.value)


def test_arrays_of_another_shape_are_refused(tmp_path):
    save_all(tmp_path, [1])
    bias = jax.eval_shape(lambda: make_state(0)).router["backbone"]["bias"]
    other = jax.ShapeDtypeStruct((2, 4), bias.dtype, sharding=bias.sharding)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_arrays(tmp_path, {"router": {"backbone": {"bias": other}}})
