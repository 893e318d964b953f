"""The metrics file across resumes, the clock's arithmetic, and the router alarm."""

import json

import pytest

from k3jax.train.metrics import MetricsFile, Progress, dead_warning, duration, read_records
from k3jax.train.plot import plot_run


def write_steps(path, first, last, resume_step=0):
    writer = MetricsFile(path, resume_step)
    for step in range(first, last + 1):
        writer.write({"kind": "train", "step": step, "loss": 1.0 / step})
    writer.close()


def test_a_resumed_file_equals_that_of_a_run_that_never_stopped(tmp_path):
    write_steps(tmp_path / "straight.jsonl", 1, 10)
    write_steps(tmp_path / "resumed.jsonl", 1, 7)  # killed at 7, last checkpoint at 5
    write_steps(tmp_path / "resumed.jsonl", 6, 10, resume_step=5)
    straight = (tmp_path / "straight.jsonl").read_text()
    assert (tmp_path / "resumed.jsonl").read_text() == straight


def test_a_line_that_a_kill_cut_short_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 3)
    with path.open("a") as file:
        file.write('{"kind": "train", "st')
    write_steps(path, 4, 4, resume_step=3)
    assert [r["step"] for r in read_records(path)] == [1, 2, 3, 4]


def test_a_new_run_in_an_old_folder_starts_an_empty_file(tmp_path):
    write_steps(tmp_path / "metrics.jsonl", 1, 3)
    write_steps(tmp_path / "metrics.jsonl", 1, 2, resume_step=0)
    assert len(list(read_records(tmp_path / "metrics.jsonl"))) == 2


class Clock:
    """A clock that a test moves by hand."""

    now = 0.0

    def __call__(self):
        return self.now


def test_the_time_left_leaves_out_compilation_and_validation():
    clock = Clock()
    progress = Progress(steps=10, clock=clock)
    clock.now = 60.0  # the first step compiles for a minute
    assert progress.tick(1) is None
    clock.now = 62.0
    assert progress.tick(2) == pytest.approx(2.0)
    clock.now = 100.0  # a validation
    progress.pause()
    clock.now = 102.0
    assert progress.tick(3) == pytest.approx(2.0)
    record = {
        "step": 3, "loss": 2.5, "grad_norm": 0.1, "learning_rate": 1e-3, "tokens_per_second": 512.0,
        "max_violation": [0.5, 1.25], "dead_experts": [0, 3],
    }  # fmt: skip
    line = progress.line(record)
    assert "step  3/10" in line and "loss 2.5000" in line and "512 tok/s" in line
    assert "max vio 1.25" in line and "dead 3" in line and line.endswith("eta 14s")


@pytest.mark.parametrize(
    "seconds, text", [(0, "0s"), (59.6, "1m00s"), (185, "3m05s"), (7800, "2h10m")]
)
def test_durations_read_like_a_clock(seconds, text):
    assert duration(seconds) == text


def test_a_router_that_uses_14_of_256_experts_is_flagged_with_its_layer_and_numbers():
    # The entropy over the experts in use is nearly perfect here, and would hide the dead ones.
    text = dead_warning(dead=[0, 242], max_violation=[0.2, 256 / 14 - 1], experts=256)
    assert text == "MoE layer 1: 94.5% of 256 experts got no token, max/mean load 18.3"


def test_a_balanced_router_raises_no_alarm():
    assert dead_warning(dead=[0, 12], max_violation=[0.1, 2.0], experts=256) is None


def test_the_plot_is_written_for_text_and_for_recall_runs(tmp_path):
    pytest.importorskip("matplotlib")
    records = [
        {"kind": "train", "step": 1, "loss": 3.0, "learning_rate": 1e-3},
        {"kind": "train", "step": 2, "loss": 2.0, "learning_rate": 2e-3},
    ]
    text = {"kind": "validation", "step": 2, "loss": 2.0, "bits_per_byte": 1.9, "full": True}
    recall = {"kind": "validation", "step": 2, "loss": 2.0}
    for name, last in (("text", text), ("recall", recall)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(r) + "\n" for r in [*records, last]))
        assert plot_run(path, tmp_path / f"{name}.png", {"gzip -9": 1.57} if "by" in last else {})
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
