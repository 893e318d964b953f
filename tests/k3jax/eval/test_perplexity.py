"""Perplexity of texts and of ids against sums taken from all logits."""

import math

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file
from small_runs import MODEL

from k3jax.eval import perplexity

# Sums of some hundred float32 terms in another order.
ROUNDING = dict(rtol=2e-5)


def nll(log_probabilities, ids):
    return -log_probabilities(ids[:-1])[np.arange(len(ids) - 1), ids[1:]].sum()


@pytest.fixture
def texts(tmp_path):
    """Two documents; with rows of 64 tokens the first takes part of one row, the second two."""
    contents = {"a.txt": "gate é🙂 decay\n", "b.txt": "value query 17 layers; " * 8}
    for name, content in contents.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    return tmp_path, contents


def test_one_document_in_one_row_costs_what_its_logits_say(
    variables, tokenizer, texts, log_probabilities
):
    folder, contents = texts
    found = perplexity.of_text(
        MODEL, variables, tokenizer, str(folder / "a.txt"), sequence_length=64, batch_size=2
    )
    text = contents["a.txt"]
    ids = [tokenizer.bos_id, *tokenizer.encode(text).tolist(), tokenizer.eos_id]
    wanted = nll(log_probabilities, ids)
    np.testing.assert_allclose(found.sums.nll, wanted, **ROUNDING)
    assert found.sums.size == len(text.encode()) and found.sums.tokens == len(ids) - 1
    values = found.values()
    np.testing.assert_allclose(values["bits_per_byte"], wanted / math.log(2) / found.sums.size)
    np.testing.assert_allclose(values["perplexity"], math.exp(wanted / (len(ids) - 1)), **ROUNDING)


def test_a_corpus_counts_every_byte_once_and_its_cut_documents(
    variables, tokenizer, texts, log_probabilities
):
    folder, contents = texts
    source = str(folder / "*.txt")
    found = perplexity.of_text(
        MODEL, variables, tokenizer, source, sequence_length=64, batch_size=2
    )
    assert found.sums.size == sum(len(text.encode()) for text in contents.values())
    stream, parts = [], []
    for text in contents.values():
        stream.append([tokenizer.bos_id, *tokenizer.encode(text).tolist(), tokenizer.eos_id])
    position = 0
    for ids in stream:  # pieces between row ends, each with the token that follows it
        start = 0
        while start < len(ids):
            end = min(len(ids), start + 64 - position % 64)
            parts.append(ids[start : end + 1])
            position, start = position + end - start, end
    wanted = sum(nll(log_probabilities, part) for part in parts if len(part) > 1)
    np.testing.assert_allclose(found.sums.nll, wanted, **ROUNDING)
    lengths = [len(ids) for ids in stream]
    assert lengths[0] < 64 < sum(lengths)
    assert (found.documents, found.documents_cut, found.row_length) == (2, 1, 64)
    assert "rows of 64, 1 of 2 documents cut" in found.line()


def test_a_file_of_ids_gives_the_sum_over_its_documents(
    variables, tmp_path, rng, log_probabilities
):
    ids = rng.integers(3, 288, (3, 64)).astype(np.int32)
    segments = np.ones((3, 64), np.int32)
    segments[0, :5], segments[1, 25:], segments[2, 30:] = 0, 2, 0
    save_file({"input_ids": ids, "segment_ids": segments}, tmp_path / "ids.safetensors")
    found = perplexity.of_tokens(MODEL, variables, tmp_path / "ids.safetensors", batch_size=2)
    pieces = [ids[0, 5:], ids[1, :25], ids[1, 25:], ids[2, :30]]
    wanted = sum(nll(log_probabilities, piece.tolist()) for piece in pieces)
    np.testing.assert_allclose(found.sums.nll, wanted, **ROUNDING)
    assert found.sums.tokens == sum(len(piece) - 1 for piece in pieces)
    assert found.documents == 4 and found.values()["bits_per_byte"] is None


def test_ids_that_predict_nothing_are_refused(variables, tmp_path):
    save_file({"input_ids": np.ones((2, 1), np.int32)}, tmp_path / "ids.safetensors")
    with pytest.raises(ValueError, match="nothing is predicted; give longer rows"):
        perplexity.of_tokens(MODEL, variables, tmp_path / "ids.safetensors", batch_size=2)


def test_logits_that_overflow_are_refused_with_their_row(variables, tmp_path, rng):
    ids = rng.integers(3, 288, (3, 64)).astype(np.int32)
    # Only token 100 sends its row beyond float32; it stands in the last batch. What is infinite
    # spreads over its whole chunk, earlier places included.
    ids[ids == 100] = 101
    ids[2, 17] = 100
    save_file({"input_ids": ids}, tmp_path / "ids.safetensors")
    old = variables["params"]["embedding"]
    table = np.array(old)
    table[100] = np.inf
    table = jax.device_put(table, old.sharding)
    broken = {**variables, "params": {**variables["params"], "embedding": table}}
    with pytest.raises(ValueError, match=r"-log p is nan in row 2 at position \d+ \(token \d+\)"):
        perplexity.of_tokens(MODEL, broken, tmp_path / "ids.safetensors", batch_size=2)
