"""The report of a training run and the description of the machine."""

import json
import sys

import jax
import pytest

from benchmarks import recipe_report
from benchmarks.environment import environment, processor


def _metrics(workdir, seconds):
    records = [
        {"kind": "train", "step": i + 1, "tokens": 10, "seconds": s} for i, s in enumerate(seconds)
    ]
    records.insert(2, {"kind": "validation", "step": 2, "loss": 1.0})
    text = "".join(json.dumps(record) + "\n" for record in records)
    (workdir / "metrics.jsonl").write_text(text, encoding="utf-8")


def test_report_times_the_steps_between_their_marks(tmp_path):
    _metrics(tmp_path, [5.0, 6.0, 8.0, 9.0])
    values = recipe_report.report(tmp_path, {"bits_per_byte": 1.5}, {"cores": 2})
    assert values["seconds"] == 9.0 and values["tokens_trained"] == 40
    assert values["step_seconds"] == {"median": 1.0, "quartiles": [1.0, 2.0]}
    assert values["bits_per_byte"] == 1.5 and values["cores"] == 2


def test_report_refuses_a_run_too_short_to_time(tmp_path):
    _metrics(tmp_path, [1.0, 2.0])
    with pytest.raises(ValueError, match="has 2 steps: a time needs three"):
        recipe_report.report(tmp_path, {}, {})


def test_only_a_new_folder_can_be_measured(tmp_path):
    recipe_report.check_new(tmp_path)
    recipe_report.check_new(tmp_path / "nothing yet")
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match="not an empty folder.*give a new --workdir"):
        recipe_report.check_new(tmp_path)


def test_save_writes_json_and_takes_the_plot_along(tmp_path):
    (tmp_path / "plot.png").write_bytes(b"picture")
    output = tmp_path / "results" / "run.json"
    recipe_report.save(tmp_path, {"seconds": 9.0}, output)
    assert json.loads(output.read_text(encoding="utf-8")) == {"seconds": 9.0}
    assert output.with_suffix(".png").read_bytes() == b"picture"


def test_environment_names_versions_and_leaves_the_folder_out():
    values = environment(["/some/where/train_recipe.py", "--workdir=x"])
    assert values["command"] == "python benchmarks/train_recipe.py --workdir=x"
    assert values["versions"]["jax"] == jax.__version__
    assert values["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert values["device"]["count"] == len(jax.devices()) and values["cores"] >= 1


def test_processor_names_the_model_and_its_vectors(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("model name\t: Chip 9\nflags\t\t: fpu avx avx2\n\nmodel name\t: other\n")
    assert processor(info) == "Chip 9 avx2"
