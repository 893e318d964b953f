"""A user's mistake ends in one line with value, rule and way out; a bug keeps its traceback."""

import pathlib
import statistics
import subprocess
import sys

import pytest

from experiments.entry import ROOT, is_ours, is_refusal, one_line_errors

RECIPE = pathlib.Path(__file__).with_name("small_recipe.py")


def refused(outcome):
    """The single line of a refusal."""
    code, _, err = outcome
    lines = [line for line in err.splitlines() if not line.startswith(("W0", "I0", "E0"))]
    assert code == 2 and len(lines) == 1 and lines[0].startswith("error: "), (code, err)
    return lines[0]


@pytest.mark.parametrize(
    "argument, words",
    [
        ("--set=train.step=20", ["train.step", "no such field", "steps"]),
        ("--set=train.steps=many", ["train.steps=many", "integer"]),
        ("--set=train.steps", ["expected path.to.field=value"]),
        ("--set=model.moe.top_k=8", ["top_k=8", "experts=8"]),
        ("--set=data.vocab_size=4096", ["data.vocab_size=4096", "model.vocab_size=288"]),
        ("--config=configs/no_such.py", ["configs/no_such.py", "tiny"]),
        ("--set=data.source=/no/such/folder", ["/no/such/folder", "does not exist", "stdlib"]),
        ("--set=train.mesh.data=64", ["64", "devices"]),
    ],
)
def test_a_mistake_in_a_training_command_is_one_line(run_script, tmp_path, argument, words):
    recipe = [] if argument.startswith("--config") else [f"--config={RECIPE}"]
    batch = ["--set=train.batch_size=64", "--set=train.eval_batch_size=64"]
    line = refused(run_script("train", *recipe, argument, *batch, f"--workdir={tmp_path}"))
    assert all(word in line for word in words), line


def test_an_empty_corpus_is_one_line(run_script, tmp_path):
    (tmp_path / "texts").mkdir()
    source = f"--set=data.source={tmp_path / 'texts'}"
    line = refused(run_script("train", f"--config={RECIPE}", source, f"--workdir={tmp_path}/run"))
    assert "texts" in line and "holds no file" in line


def test_a_workdir_that_is_a_file_is_one_line(run_script, tmp_path):
    (tmp_path / "notes.txt").write_text("")
    workdir = f"--workdir={tmp_path / 'notes.txt'}"
    assert "is a file" in refused(run_script("train", f"--config={RECIPE}", workdir))
    line = refused(run_script("train", f"--config={RECIPE}", f"{workdir}/run"))
    assert "cannot be written (Not a directory)" in line


@pytest.mark.parametrize("script", ["sample", "logits"])
def test_a_bad_checkpoint_folder_is_one_line_that_lists_what_is_there(run_script, tmp_path, script):
    (tmp_path / "notes.txt").write_text("")
    more = ["--input=a", "--output=b"] if script == "logits" else []
    line = refused(run_script(script, f"--checkpoint={tmp_path}", *more))
    assert "holds no checkpoint" in line and "notes.txt" in line
    line = refused(run_script(script, f"--checkpoint={tmp_path}/nothing", *more))
    assert "does not exist" in line and "notes.txt" in line


def test_a_setting_of_the_sampler_without_a_meaning_is_one_line(run_script, tmp_path):
    line = refused(run_script("sample", f"--checkpoint={tmp_path}", "--top_p=1.5"))
    assert "top_p 1.5" in line


def test_a_file_that_the_system_refuses_is_one_line(capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        one_line_errors(lambda argv: (tmp_path / "none" / "out").write_text(""))(["logits"])
    assert stop.value.code == 2
    assert "none/out' cannot be used (No such file or directory)" in capsys.readouterr().err


def test_a_word_that_is_no_flag_is_one_line(capsys):
    with pytest.raises(SystemExit) as stop:
        one_line_errors(lambda argv: print("ran"))(["train", "steps=3"])
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert printed.err == "error: unexpected argument 'steps=3'; write flags as --name=value\n"


def test_a_value_error_from_inside_a_library_keeps_its_traceback():
    with pytest.raises(ValueError, match="sigma"):
        one_line_errors(lambda argv: statistics.NormalDist(0, -1))(["train"])


def test_an_operation_that_fails_in_our_own_code_keeps_its_traceback():
    with pytest.raises(ValueError, match="invalid literal") as caught:
        one_line_errors(lambda argv: int("eleven"))(["train"])
    assert is_ours(__file__) and not is_refusal(caught.value)


def test_only_files_of_this_repository_count_as_ours():
    assert is_ours(str(ROOT / "k3jax" / "config.py"))
    assert not is_ours(str(ROOT / ".venv" / "lib" / "site-packages" / "jax" / "numpy.py"))
    assert not is_ours("/usr/lib/python3/json/decoder.py")


@pytest.mark.parametrize("command", [["experiments/train.py"], ["-m", "experiments.train"]])
def test_a_mistake_ends_the_process_with_code_2_and_no_traceback(command):
    argv = [sys.executable, *command, f"--config={RECIPE}", "--set=nothing=1"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: nothing") and "Traceback" not in done.stderr
