"""The data command shows what a run would read and refuses what a run would refuse."""

import json
import pathlib

import pytest

RECIPE = pathlib.Path(__file__).with_name("small_recipe.py")


@pytest.fixture
def report(run_script, tmp_path):
    """Two sources of text, code and my-prose -> (exit code, stdout, stderr) of the command."""
    for name, count in (("code", 12), ("my-prose", 9)):
        (tmp_path / name).mkdir()
        for number in range(count):
            words = [f"{name} {number * 37 + n} {number * n}" for n in range(60)]
            (tmp_path / name / f"{number}.txt").write_text("\n".join(words))

    def run(*arguments):
        return run_script(
            "data",
            f"--config={RECIPE}",
            "--set=data.validation_fraction=0.2",
            f"--set=data.sources=code={tmp_path}/code,my-prose={tmp_path}/my-prose",
            f"--set=data.cache_dir={tmp_path}/cache",
            *arguments,
        )

    return run


def test_the_report_is_printed_and_written_without_training(report, tmp_path):
    output = tmp_path / "report.json"
    weights = "--set=data.weights=code=0.75,my-prose=0.25"
    code, out, err = report(weights, f"--output={output}")
    assert code == 0, err
    assert "code: train " in out and "75.0% of the rows" in out and "my-prose: validation" in out
    found = json.loads(output.read_text())
    assert [source["name"] for source in found["sources"]] == ["code", "my-prose"]
    assert found["rows"] == 4 and found["sources"][1]["share_of_rows"] == 0.25


def test_a_misspelt_source_ends_in_one_line_with_the_names_present(report):
    code, _, err = report("--set=data.weights=code=0.7,my_prose=0.3")
    lines = [line for line in err.splitlines() if not line.startswith(("W0", "I0", "E0"))]
    assert code == 2 and len(lines) == 1
    assert "no source 'my_prose'" in err and "code, my-prose; did you mean 'my-prose'?" in err
