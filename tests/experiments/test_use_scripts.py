"""Sampling text and writing logits from a checkpoint."""

import os
import pathlib

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_recipe import config

from k3jax.models.kimi_k3 import model
from k3jax.train.restore import load_model

DEFAULT = pathlib.Path(__file__).parents[1] / "golden"
GOLDEN = pathlib.Path(os.environ.get("K3JAX_GOLDEN", DEFAULT))


@pytest.fixture
def sample(run_script, checkpoint):
    def run(*arguments):
        code, out, err = run_script(
            "sample", f"--checkpoint={checkpoint}", "--prompt=def ", "--tokens=12", *arguments
        )
        assert code == 0, err
        return out

    return run


def test_a_sample_starts_with_the_prompt_and_equal_seeds_write_equal_texts(sample):
    first = sample("--seed=1")
    assert first.startswith("def ") and len(first) > len("def ")
    assert first == sample("--seed=1") != sample("--seed=2")


def test_greedy_is_temperature_zero_whatever_the_seed(sample):
    assert sample("--greedy", "--seed=5") == sample("--temperature=0", "--seed=6")


def test_a_step_folder_serves_as_well_as_the_workdir(run_script, checkpoint):
    step = checkpoint / "checkpoints" / "1"
    code, out, _ = run_script("sample", f"--checkpoint={step}", "--prompt=a", "--tokens=2")
    assert code == 0 and out.startswith("a")


@pytest.fixture
def write_logits(run_script, checkpoint, tmp_path):
    """Tensors -> (exit code, output tensors, stderr)."""

    def run(tensors):
        source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
        save_file(tensors, source)
        code, _, err = run_script(
            "logits", f"--checkpoint={checkpoint}", f"--input={source}", f"--output={target}"
        )
        return code, load_file(target) if code == 0 else {}, err

    return run


def test_logits_are_those_of_the_model_row_by_row_and_zero_at_padding(
    write_logits, checkpoint, rng
):
    ids = rng.integers(0, 288, (2, 20)).astype(np.int32)
    segments = np.ones((2, 20), np.int32)
    segments[0, :4], segments[1, 12:] = 0, 2
    code, written, err = write_logits({"input_ids": ids, "segment_ids": segments})
    assert code == 0, err
    assert set(written) == {"logits"} and written["logits"].dtype == np.float32
    assert written["logits"].shape == (2, 20, 288)
    assert not np.any(written["logits"][0, :4]) and np.all(np.any(written["logits"][1], axis=-1))
    variables = load_model(checkpoint).variables
    run = jax.jit(lambda t, s: model.logits(config().model, variables, t, s))
    # Both rows at once against row by row: another order of sums.
    np.testing.assert_allclose(written["logits"], run(ids, segments), atol=1e-5)


def test_without_segment_ids_a_row_is_one_document_of_any_integer_type(write_logits, rng):
    ids = rng.integers(0, 288, (1, 20))
    code, plain, _ = write_logits({"input_ids": ids})
    assert code == 0
    segments = np.ones((1, 20), np.int64)
    _, explicit, _ = write_logits({"input_ids": ids.astype(np.int32), "segment_ids": segments})
    assert np.array_equal(plain["logits"], explicit["logits"])


ROW = np.arange(6, dtype=np.int32)[None]


@pytest.mark.parametrize(
    "tensors, words",
    [
        ({"tokens": ROW}, ["'input_ids'", "tokens"]),
        ({"input_ids": ROW + 283}, ["288", "position 5", "0..287"]),
        ({"input_ids": ROW - 1}, ["-1", "position 0"]),
        ({"input_ids": ROW[0]}, ["(6,)", "[B, T]"]),
        ({"input_ids": ROW.astype(np.float32)}, ["float32", "integer"]),
        ({"input_ids": ROW[:, :0]}, ["at least one token"]),
        ({"input_ids": ROW, "segment_ids": ROW[:, 1:]}, ["(1, 5)", "(1, 6)"]),
        ({"input_ids": ROW, "segment_ids": ROW[:, ::-1].copy()}, ["segment_ids[0, 1]", "decrease"]),
        ({"input_ids": ROW, "segment_ids": ROW + np.int64(2**32)}, [str(2**32 + 5)]),
    ],
)
def test_ids_that_do_not_fit_are_refused_in_one_line(write_logits, tensors, words):
    code, _, err = write_logits(tensors)
    line = [line for line in err.splitlines() if line.startswith("error: ")][-1]
    assert code == 2 and all(word in line for word in words), line


def test_a_missing_or_foreign_input_file_is_refused_in_one_line(run_script, checkpoint, tmp_path):
    (tmp_path / "text.txt").write_text("not tensors")
    for name in ("text.txt", "absent.safetensors"):
        code, _, err = run_script(
            "logits",
            f"--checkpoint={checkpoint}",
            f"--input={tmp_path / name}",
            f"--output={tmp_path / 'out.safetensors'}",
        )
        assert code == 2 and name in err and "cannot be read" in err


def test_an_output_that_is_a_folder_is_refused_before_any_work(run_script, checkpoint, tmp_path):
    files = f"--input={tmp_path / 'absent.safetensors'}", f"--output={tmp_path}"
    code, _, err = run_script("logits", f"--checkpoint={checkpoint}", *files)
    assert code == 2 and "is a folder; name a file in it" in err


def test_logits_of_a_released_layout_folder_are_the_golden_ones(run_script, tmp_path):
    expected = load_file(GOLDEN / "kimi_linear_tiny" / "expected.safetensors")
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file({"input_ids": expected["main.input_ids"]}, source)
    code, _, err = run_script(
        "logits",
        f"--checkpoint={GOLDEN / 'kimi_linear_tiny'}",
        f"--input={source}",
        f"--output={target}",
    )
    assert code == 0, err
    # The tolerance stated beside the golden data for text logits.
    np.testing.assert_allclose(load_file(target)["logits"], expected["main.logits"], atol=1e-3)


def test_a_folder_without_a_tokenizer_cannot_be_sampled_from_and_says_what_works(run_script):
    code, _, err = run_script("sample", f"--checkpoint={GOLDEN / 'kimi_linear_tiny'}")
    assert code == 2 and "no tokenizer" in err and "experiments/logits.py" in err
