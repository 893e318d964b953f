"""What a whole evaluation writes, and what it refuses before it starts."""

import dataclasses
import json
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file
from small_runs import MODEL

from k3jax import config
from k3jax.eval import harness, suite
from k3jax.eval.suite import EvalConfig


@pytest.fixture
def hay(tmp_path):
    (tmp_path / "hay.txt").write_text("value query 17 layers; " * 8)
    return str(tmp_path / "hay.txt")


def test_every_part_is_written_to_one_file_of_plain_json(variables, tokenizer, hay, tmp_path, rng):
    ids = rng.integers(3, 288, (2, 64)).astype(np.int32)
    save_file({"input_ids": ids}, tmp_path / "ids.safetensors")
    wanted = EvalConfig(
        data=hay, tokens=str(tmp_path / "ids.safetensors"), needle_lengths=(60,),
        needle_depths=(0.0, 1.0), needle_trials=1, sequence_length=64, batch_size=2,
    )  # fmt: skip
    lines = []
    result = suite.run(MODEL, variables, tokenizer, wanted, tmp_path / "out", lines.append)
    written = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert written == json.loads(json.dumps(result))
    assert set(written) == {"settings", "text", "tokens", "needle"}
    assert written["settings"]["sequence_length"] == 64 == written["text"]["row_length"]
    assert [(c["length"], c["depth"]) for c in written["needle"]] == [(60, 0.0), (60, 1.0)]
    assert all(cell["log_probability"] < 0 for cell in written["needle"])
    assert (tmp_path / "out" / "needle.png").exists()
    assert [line for line in lines if line.startswith(hay)] and "evaluation.json" in lines[-1]
    again = suite.run(MODEL, variables, tokenizer, wanted, None, lambda line: None)
    assert again == result


def test_a_missing_matplotlib_is_announced_once_and_costs_no_number(
    variables, tokenizer, hay, tmp_path, monkeypatch
):
    monkeypatch.setattr(suite.heat_map, "draw", lambda cells, output: False)
    wanted = EvalConfig(
        data=hay, needle_lengths=(60,), needle_depths=(0.0,), needle_trials=1,
        sequence_length=64, batch_size=2,
    )  # fmt: skip
    lines = []
    suite.run(MODEL, variables, tokenizer, wanted, tmp_path / "out", lines.append)
    assert lines.count("no needle.png: matplotlib is not installed") == 1
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text())["needle"]


@pytest.mark.parametrize("settings", [{"data": "a.txt"}, {"tasks": ("a.yaml",)}])
def test_text_is_refused_without_a_tokenizer(settings):
    with pytest.raises(ValueError, match="holds no tokenizer.*--tokens=FILE"):
        suite.run(MODEL, {}, None, EvalConfig(**settings), None)


def test_an_evaluation_of_nothing_is_refused():
    with pytest.raises(ValueError, match="nothing to measure"):
        suite.run(MODEL, {}, None, EvalConfig(), None)


def test_settings_are_read_from_flags_by_their_fields():
    given = ["needle_lengths=256,1024", "needle_depths=0,0.5", "tasks=a.yaml,b.yaml", "data=t/*.py"]
    wanted = config.override(EvalConfig(), given)
    assert wanted.needle_lengths == (256, 1024) and wanted.needle_depths == (0.0, 0.5)
    assert wanted.tasks == ("a.yaml", "b.yaml") and wanted.data == "t/*.py"
    assert dataclasses.replace(wanted, data=None).data is None
    for wrong, message in (
        ("batch_size=0", "batch_size=0"),
        ("sequence_length=1", "sequence_length=1"),
        ("needle_trials=0", "needle_trials=0"),
    ):
        with pytest.raises(ValueError, match=message):
            config.override(EvalConfig(), [*given, wrong])


def test_tasks_without_lm_eval_name_the_extra_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(ValueError, match="tasks need lm-eval.*EXTRAS=train,dev,eval"):
        harness.load_tasks(["a.yaml"])
