"""Records, TensorBoard files, profiles, norms by name and pictures of a run."""

import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import MODEL, with_train

from k3jax.models.kimi_k3 import counting
from k3jax.optim.norms import norms_by_name
from k3jax.train.metrics import read_records
from k3jax.train.plot import last_load, plot_runs
from k3jax.train.profile import Profiler
from k3jax.train.report import Reporter
from k3jax.train.tensorboard import FOLDER, TensorBoard

VALUES = {
    "loss": 5.0, "grad_norm": 2.0, "learning_rate": 1e-3, "tokens": 64,
    "max_violation": [0.5, 1.5], "dead_experts": [0, 1], "load": [[1, 2, 3], [0, 4, 2]],
    "grad_norms": {"w_q": 1.0, "w_o": 0.5},
}  # fmt: skip


def scalars(folder):
    """{(tag, step): value} of all event files, read without TensorBoard."""
    from tensorboardX.event_file_writer import EventFileWriter  # noqa: F401  (the package is there)
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    for file in sorted(folder.glob("events.*")):
        data, place = file.read_bytes(), 0
        while place < len(data):  # length, its checksum, the event, its checksum
            size = int.from_bytes(data[place : place + 8], "little")
            event = Event.FromString(data[place + 12 : place + 12 + size])
            place += 16 + size
            for value in event.summary.value:
                found[value.tag, event.step] = value.simple_value
    return found


@pytest.fixture
def reporter(run_config, tmp_path):
    lines = []
    cfg = with_train(run_config, tensorboard=True)
    made = Reporter(cfg, tmp_path, 0, lines.append)
    made.lines = lines
    yield made
    made.close()


def test_every_number_of_a_record_becomes_a_scalar_and_a_list_its_largest(reporter, tmp_path):
    reporter.step(1, VALUES, "abcd1234")
    reporter.write({"kind": "validation", "step": 1, "full": False, "loss": 4.0})
    reporter.close()
    found = scalars(tmp_path / FOLDER)
    assert found["train/loss", 1] == 5.0 and found["validation/loss", 1] == 4.0
    assert found["train/max_violation_max", 1] == 1.5 and found["train/dead_experts_max", 1] == 1
    assert found["train/grad_norms/w_q", 1] == 1.0
    assert not any("batch" in tag or "load" in tag for tag, _ in found)


def test_tensorboard_without_its_package_is_refused_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ValueError, match=r"needs tensorboardX.*k3jax\[train\]"):
        TensorBoard(tmp_path, 0)


def test_loads_are_recorded_apart_and_drawn_in_units_of_the_mean(reporter, tmp_path):
    reporter.step(1, VALUES, "abcd1234")
    reporter.balance(1, VALUES)
    reporter.balance(2, {"load": None})
    records = list(read_records(tmp_path / "metrics.jsonl"))
    assert [r["kind"] for r in records] == ["train", "balance"]
    assert "load" not in records[0] and records[1]["load"] == VALUES["load"]
    step, load = last_load(records)
    assert step == 1
    np.testing.assert_allclose(load, [[0.5, 1.0, 1.5], [0.0, 2.0, 1.0]])
    assert last_load(records[:1]) is None


def test_utilisation_is_the_models_work_over_the_measured_peak(reporter, tmp_path, monkeypatch):
    monkeypatch.setattr("k3jax.train.report.peak_flops", lambda: (1e9, "told"))
    reporter.find_peak()
    for step in (1, 2, 3):
        reporter.step(step, VALUES, "abcd1234")
    records = list(read_records(tmp_path / "metrics.jsonl"))
    assert "utilisation" not in records[0]  # the first step compiles and has no speed
    work = counting.flops_per_token(MODEL, 64)
    share = records[2]["tokens_per_second"] * work / 1e9
    assert records[2]["utilisation"] == pytest.approx(share)
    assert any("MFLOP/token" in line and "told" in line for line in reporter.lines)


def test_norms_by_name_join_the_layers(rng):
    tree = {
        "a": {"w_q": rng.normal(size=(3, 4)), "w_o": rng.normal(size=5)},
        "b": {"w_q": rng.normal(size=(2, 2))},
    }
    found = norms_by_name({k: {n: jnp.asarray(x) for n, x in v.items()} for k, v in tree.items()})
    both = np.concatenate([tree["a"]["w_q"].ravel(), tree["b"]["w_q"].ravel()])
    assert list(found) == ["w_o", "w_q"]
    np.testing.assert_allclose(found["w_q"], np.linalg.norm(both), rtol=1e-6)
    np.testing.assert_allclose(found["w_o"], np.linalg.norm(tree["a"]["w_o"]), rtol=1e-6)


def test_a_profile_covers_the_steps_asked_for_and_is_closed_behind_them(tmp_path):
    lines, running = [], []
    profiler = Profiler(tmp_path, (2, 3), lines.append)
    for step in range(1, 5):
        profiler.before(step)
        running.append(profiler._running)
        profiler.after(step, jnp.float32(step))
    assert running == [False, True, True, False]
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    assert len(lines) == 1 and "steps 2 to 3" in lines[0]


def test_a_run_that_ends_inside_the_range_keeps_its_profile(tmp_path):
    profiler = Profiler(tmp_path, (1, 9), lambda _: None)
    profiler.before(1)
    profiler.close()
    profiler.close()
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


def test_a_range_that_ends_before_it_begins_is_refused(run_config):
    with pytest.raises(ValueError, match=r"profile_steps=\(5, 3\).*no later than the last"):
        with_train(run_config, profile_steps=(5, 3))


@pytest.fixture
def runs(tmp_path):
    """Metrics files of a run with text and experts, and of one without either."""
    files = {}
    for name, bits in (("one", True), ("other", False)):
        records = [
            {"kind": "train", "step": s, "loss": 5 - s / 10, "learning_rate": 1e-3,
             "tokens_per_second": None if s == 1 else 100.0 * s}
            for s in range(1, 6)
        ]  # fmt: skip
        for full in (False, True):
            record = {"kind": "validation", "step": 5, "full": full, "loss": 4.0}
            records.append(record | ({"bits_per_byte": 1.5} if bits else {}))
        if bits:
            records.append({"kind": "balance", "step": 5, "load": [[1, 2], [3, 0]]})
        files[name] = tmp_path / f"{name}.jsonl"
        files[name].write_text("".join(json.dumps(r) + "\n" for r in records))
    return files


def test_several_runs_are_drawn_over_each_other_with_a_map_for_each_that_has_experts(
    runs, tmp_path
):
    from matplotlib import image

    heights = {}
    for name, chosen in (("both", runs), ("other", {"other": runs["other"]})):
        assert plot_runs(chosen, tmp_path / f"{name}.png")
        heights[name] = image.imread(tmp_path / f"{name}.png").shape[0]
    assert heights["both"] > heights["other"]


def test_a_folder_that_has_not_trained_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no training step"):
        plot_runs({"new": tmp_path / "metrics.jsonl"}, tmp_path / "plot.png")
