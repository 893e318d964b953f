"""Requests of a harness: texts to tokens to scores, by lm-eval's conventions, without lm-eval."""

import numpy as np
import pytest
from small_runs import MODEL

from k3jax.eval import perplexity
from k3jax.eval.text_model import Generation, TextModel, read_generation
from k3jax.models.kimi_k3.sampling import Sampling

# Sums of some dozens of float32 terms in another order.
ROUNDING = dict(rtol=2e-5)
LENGTH = 64


@pytest.fixture(scope="module")
def judge(variables, tokenizer):
    return TextModel(MODEL, variables, tokenizer, LENGTH, batch_size=2)


def test_a_pair_is_split_where_the_context_alone_would_end(judge, tokenizer):
    pair = judge.encode_pair("state decay", " gate")
    assert pair.context == [tokenizer.bos_id, *tokenizer.encode("state decay")]
    assert [*pair.context[1:], *pair.continuation] == tokenizer.encode("state decay gate").tolist()


def test_blanks_at_the_end_of_a_context_belong_to_the_continuation(judge):
    assert judge.encode_pair("state  ", "gate") == judge.encode_pair("state", "  gate")


def test_an_empty_context_is_the_beginning_of_a_document(judge, tokenizer):
    for context in ("", "  "):
        pair = judge.encode_pair(context, "gate")
        assert pair.context == [tokenizer.bos_id]
        assert tokenizer.decode(pair.continuation) == context + "gate"


def test_a_continuation_that_merges_into_the_context_is_encoded_by_itself(judge, tokenizer):
    merged = tokenizer.encode("ate")
    assert len(merged) == 1 and len(tokenizer.encode("at")) >= 1
    pair = judge.encode_pair("at", "e")
    assert tokenizer.decode([*pair.context, *pair.continuation]) == "ate"


def test_an_empty_continuation_is_refused(judge):
    with pytest.raises(ValueError, match="continuation of context 'state' is empty"):
        judge.encode_pair("state", "")


def test_log_likelihoods_are_sums_over_the_continuation_in_any_batch(
    judge, tokenizer, log_probabilities
):
    requests = [("state decay", " gate"), ("", "é🙂"), ("value ", "query layer"), ("a", " b")]
    found = judge.log_likelihoods(requests)
    for (context, continuation), (nats, greedy) in zip(requests, found, strict=True):
        given, text = context.rstrip(), context + continuation
        ids = [tokenizer.bos_id, *tokenizer.encode(text).tolist()]
        start = len(tokenizer.encode(given)) + 1
        table = log_probabilities(ids[:-1])[start - 1 :]
        wanted = table[np.arange(len(ids) - start), ids[start:]].sum()
        np.testing.assert_allclose(nats, wanted, **ROUNDING)
        assert greedy == (table.argmax(axis=-1).tolist() == ids[start:])
    alone = [judge.log_likelihoods([request])[0][0] for request in requests]
    np.testing.assert_allclose([nats for nats, _ in found], alone, **ROUNDING)


def test_rolling_is_the_sum_of_perplexity_without_the_end_of_the_document(
    judge, variables, tokenizer, tmp_path, log_probabilities
):
    texts = ["gate", "value query 17 layers; " * 9, ""]
    ids = [[tokenizer.bos_id, *tokenizer.encode(text).tolist()] for text in texts]
    assert len(ids[0]) < LENGTH < len(ids[1])
    found = judge.rolling(texts)
    for text, row, nats in zip(texts[:2], ids, found, strict=False):
        (tmp_path / "text.txt").write_text(text)
        whole = perplexity.of_text(
            MODEL, variables, tokenizer, str(tmp_path / "text.txt"),
            sequence_length=LENGTH, batch_size=2,
        )  # fmt: skip
        last = row[(len(row) - 1) // LENGTH * LENGTH :]  # of the row that <|eos|> is predicted in
        end = log_probabilities(last)[-1, tokenizer.eos_id]
        np.testing.assert_allclose(nats, -whole.sums.nll - end, **ROUNDING)
    assert found[2] == 0.0


def greedy_text(tokenizer, log_probabilities, context, count):
    ids = [tokenizer.bos_id, *tokenizer.encode(context).tolist()]
    start = len(ids)
    for _ in range(count):
        ids.append(int(log_probabilities(ids)[-1].argmax()))
    return tokenizer.decode(ids[start:])


def test_texts_continue_greedily_and_end_before_a_stop_text(judge, tokenizer, log_probabilities):
    contexts = ["state decay", "value query layer block", "gate"]
    wanted = [greedy_text(tokenizer, log_probabilities, c, 12) for c in contexts]
    plain = read_generation({"max_gen_toks": 12})
    assert judge.continue_texts([(c, plain) for c in contexts]) == wanted
    stop = wanted[0][5:7]
    ends = read_generation({"until": ["never", stop], "max_gen_toks": 12})
    found = judge.continue_texts([(contexts[0], ends), (contexts[1], plain)])
    assert found == [wanted[0].partition(stop)[0], wanted[1]]


def test_a_text_ends_with_the_document_and_keeps_whole_characters(tokenizer):
    from k3jax.eval.text_model import _Row

    row = _Row(tokenizer, ("x",))
    for token in [*tokenizer.encode("é🙂").tolist(), tokenizer.eos_id, *tokenizer.encode("x")]:
        row.push(token)
    assert row.ended and row.text() == "é🙂"
    cut = _Row(tokenizer, ())
    cut.push(int(tokenizer.encode("🙂")[0]))
    assert not cut.ended and cut.text() == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, Generation((), 256, Sampling(0.0))),
        ({"until": "\n"}, Generation(("\n",), 256, Sampling(0.0))),
        ({"until": ["", "a"], "max_gen_toks": 3}, Generation(("a",), 3, Sampling(0.0))),
        ({"do_sample": False, "temperature": 0.7}, Generation((), 256, Sampling(0.0))),
        ({"do_sample": True}, Generation((), 256, Sampling(1.0))),
        (
            {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "top_k": 7},
            Generation((), 256, Sampling(0.5, 7, 0.9)),
        ),
    ],
)
def test_generation_options_read_as_lm_eval_means_them(options, wanted):
    assert read_generation(options) == wanted


def test_an_unknown_generation_option_is_refused_by_name():
    with pytest.raises(ValueError, match="generation option 'num_beams' is unknown"):
        read_generation({"num_beams": 4})
