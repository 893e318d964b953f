"""The plan's entry point, and what the released model costs to plan."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def test_plan_prints_and_writes_the_same_numbers(run_script, tmp_path):
    target = tmp_path / "plan.json"
    code, out, _ = run_script(
        "plan", "--config=debug", "--mesh=data=2", "--batch=8", "--sequence=64",
        "--set=model.remat=true", "--device_memory=L4", f"--json={target}",
    )  # fmt: skip
    values = json.loads(target.read_text("utf-8"))
    assert code == 0 and values["fits"] and values["device_memory"] == 24 << 30
    assert values["tokens_per_step"] == 512 and values["mesh"]["data"] == 2
    for number in (values["parameters"], values["parameters_as_released"], values["active"]):
        assert f"{number:,}" in out
    assert f"{values['training_flops_per_token']:.4g}" in out
    assert "mesh stage=1, data=2, expert=1, context=1" in out and "layers recomputed" in out


@pytest.mark.parametrize(
    "flag", ["--mesh=data=3", "--mesh=planet=2", "--device_memory=lots", "--batch=0"]
)
def test_a_plan_that_cannot_be_made_ends_in_one_line(run_script, flag):
    code, _, err = run_script("plan", "--config=debug", flag)
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1


USAGE = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime, used.ru_maxrss)
"""  # a small parent: a child's peak is at least the size of the process that it was forked from


def test_the_released_model_is_planned_in_ten_seconds_and_two_gib(tmp_path):
    target = tmp_path / "plan.json"
    plan = ["experiments/plan.py", "--config=kimi_k3", "--mesh=data=8,expert=16"]
    command = [sys.executable, "-c", USAGE, sys.executable, *plan, f"--json={target}"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    seconds, kib = map(float, done.stdout.split())
    assert seconds < 10  # processor time: wall time of an idle core, whatever else runs here
    assert kib < 2 << 20
    values = json.loads(target.read_text("utf-8"))
    assert values["parameters"] == 2_779_484_476_000 and not values["fits"]
