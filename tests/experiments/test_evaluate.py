"""Judging a checkpoint by the command line."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_use_scripts import GOLDEN


@pytest.fixture
def evaluate(run_script, tmp_path):
    """(checkpoint, *flags) -> (exit code, what was written, stderr's last line)."""

    def run(folder, *arguments):
        output = tmp_path / "out"
        code, _, err = run_script(
            "evaluate", f"--checkpoint={folder}", f"--output={output}", *arguments
        )
        written = json.loads((output / "evaluation.json").read_text()) if code == 0 else {}
        return code, written, (err.splitlines() or [""])[-1]

    return run


def test_a_text_is_judged_in_bits_per_byte(evaluate, checkpoint, tmp_path):
    (tmp_path / "a.txt").write_text("def f(x):\n    return x\n")
    flags = [f"--data={tmp_path}/*.txt", "--sequence_length=32", "--batch_size=2"]
    code, written, err = evaluate(checkpoint, *flags)
    assert code == 0, err
    text = written["text"]
    assert text["bytes"] == 23 and text["tokens"] == 24 and text["documents"] == 1
    # An untrained model guesses: 288 ids at about one byte each.
    assert 7.5 < text["bits_per_byte"] < 10
    assert text["perplexity"] == pytest.approx(np.exp(text["loss"]))


@pytest.mark.slow
def test_a_released_layout_folder_is_judged_on_ids(evaluate, tmp_path):
    expected = load_file(GOLDEN / "kimi_linear_tiny" / "expected.safetensors")
    ids, logits = expected["main.input_ids"], expected["main.logits"].astype(np.float64)
    save_file({"input_ids": ids}, tmp_path / "ids.safetensors")
    code, written, err = evaluate(
        GOLDEN / "kimi_linear_tiny", f"--tokens={tmp_path / 'ids.safetensors'}", "--batch_size=2"
    )
    assert code == 0, err
    logits = logits - logits.max(axis=-1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    chosen = np.take_along_axis(log_p[:, :-1], ids[:, 1:, None].astype(int), axis=-1)
    # The tolerance of golden logits bounds that of any mean of their log-probabilities twice over.
    assert written["tokens"]["loss"] == pytest.approx(-chosen.mean(), abs=2e-3)
    assert written["tokens"]["bits_per_byte"] is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["nothing to measure", "--data"]),
        (["--data=/no/such/text"], ["/no/such/text", "does not exist"]),
        (["--tokens=/no/such/ids"], ["/no/such/ids", "cannot be read"]),
        (["--needle_lengths=12x"], ["needle_lengths=12x", "list of int"]),
        (["--needle_lengths=20", "--data={text}"], ["needle_lengths=20", "give at least"]),
        (["--needle_lengths=64", "--needle_depths=2"], ["needle_depths=2", "[0, 1]"]),
        (["--data={text}", "--batch_size=0"], ["batch_size=0"]),
    ],
)
def test_a_mistake_in_an_evaluation_is_one_line(evaluate, checkpoint, tmp_path, arguments, words):
    text = tmp_path / "text.txt"
    text.write_text("some text\n" * 20)
    code, _, line = evaluate(checkpoint, *(a.format(text=text) for a in arguments))
    assert code == 2 and line.startswith("error: ") and all(word in line for word in words), line


def test_a_checkpoint_with_a_number_that_is_none_is_refused_by_every_command(run_script, tmp_path):
    folder = tmp_path / "released"
    shutil.copytree(GOLDEN / "kimi_linear_tiny", folder)
    (shard,) = folder.glob("model*.safetensors")
    tensors = load_file(shard)
    name = next(n for n in sorted(tensors) if ".layers.1." in n and n.endswith("o_proj.weight"))
    tensors[name] = np.array(tensors[name])
    tensors[name][0, 0] = np.nan
    save_file(tensors, shard, metadata={"format": "pt"})
    more = {"evaluate": ["--tokens=a"], "logits": ["--input=a", "--output=b"], "sample": []}
    for script, arguments in more.items():
        code, _, err = run_script(script, f"--checkpoint={folder}", *arguments)
        line = err.splitlines()[-1]
        assert code == 2 and "parameter mixer/w_o of layer 1 (from 0) holds 1" in line, line
