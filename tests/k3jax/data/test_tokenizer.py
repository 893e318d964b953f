"""Any text comes back byte for byte, special tokens never come out of text."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.data.tokenizer import SPECIAL_TOKENS, StreamDecoder, Tokenizer

TEXTS = [f"def f_{i}(x):\n    if x > {i}:\n        return x.size\n" * 3 for i in range(40)]
TOKENIZER = Tokenizer.train(TEXTS, 350)

HARD = [
    "",
    "a\r\nb\rc\n\n\n\t d  ",
    "\0\x01\x7f\x85\u2028\ufeff\uffff",
    "你好 world's 12345\r\n\n  x, e\u0301 \U0001f469\u200d\U0001f469\u200d\U0001f467",
    "<|bos|><|eos|><|pad|>",
    " " * 3000 + "=" * 3000 + "x" * 3000,
]


@pytest.mark.parametrize("text", HARD)
def test_hard_texts_round_trip(text):
    ids = TOKENIZER.encode(text)
    assert ids.dtype == np.int32 and ids.ndim == 1
    assert TOKENIZER.decode_bytes(ids) == text.encode()
    assert TOKENIZER.decode(ids) == text


@settings(max_examples=150, deadline=None)
@given(st.text())
def test_every_text_round_trips_without_special_ids(text):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert not np.any(ids < len(SPECIAL_TOKENS))


def test_every_single_byte_has_an_id_of_its_own():
    alone = {TOKENIZER.decode_bytes([i]): i for i in range(TOKENIZER.vocab_size)}
    assert all(bytes([b]) in alone for b in range(256))


def test_text_that_spells_a_special_token_is_plain_text():
    ids = TOKENIZER.encode("see <|eos|> here")
    assert len(ids) > 7
    assert set(ids.tolist()).isdisjoint({TOKENIZER.pad_id, TOKENIZER.bos_id, TOKENIZER.eos_id})
    assert TOKENIZER.decode([TOKENIZER.bos_id, *ids, TOKENIZER.eos_id]) == "see <|eos|> here"


def test_training_is_deterministic_and_stays_within_the_vocabulary():
    again = Tokenizer.train(TEXTS, 350)
    assert again.fingerprint == TOKENIZER.fingerprint
    assert again.vocab_size <= 350
    assert Tokenizer.train(TEXTS, 300).fingerprint != TOKENIZER.fingerprint
    assert Tokenizer.train(["ab"], 4096).vocab_size == 259
    assert Tokenizer.train(TEXTS, 259).vocab_size == 259
    for short in (10, 258):
        with pytest.raises(ValueError, match=f"vocab_size {short} must be at least 259"):
            Tokenizer.train(TEXTS, short)


def test_the_end_of_a_line_and_the_next_indentation_can_be_one_token():
    pieces = [TOKENIZER.decode([i]) for i in TOKENIZER.encode("def f_1(x):\n    if x > 1:\n")]
    assert any(piece.startswith("):\n") and piece.endswith("    ") for piece in pieces)


def test_digits_are_cut_into_at_most_three():
    numbers = Tokenizer.train(["1234567 " * 50], 300)
    assert max(len(numbers.decode([i]).strip()) for i in numbers.encode("1234567")) == 3


def test_byte_lengths_add_up_to_the_text():
    text = HARD[3]
    lengths = TOKENIZER.byte_lengths
    assert lengths.shape == (TOKENIZER.vocab_size,)
    assert lengths[:3].tolist() == [0, 0, 0]
    assert lengths[TOKENIZER.encode(text)].sum() == len(text.encode())


def test_saving_and_loading_keeps_ids_and_fingerprint(tmp_path):
    TOKENIZER.save(tmp_path / "t.json")
    loaded = Tokenizer.load(tmp_path / "t.json")
    assert loaded.fingerprint == TOKENIZER.fingerprint
    for text in HARD:
        np.testing.assert_array_equal(loaded.encode(text), TOKENIZER.encode(text))


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '{"version": 1, "pattern": "x", "merges": []}']
)
def test_a_file_that_is_no_tokenizer_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(ValueError, match="t.json.*delete it") as error:
        Tokenizer.load(tmp_path / "t.json")
    assert "\n" not in str(error.value)


def test_ids_outside_the_vocabulary_and_surrogates_are_refused():
    with pytest.raises(ValueError, match=rf"token id {TOKENIZER.vocab_size} lies outside"):
        TOKENIZER.decode([TOKENIZER.vocab_size])
    with pytest.raises(ValueError, match="token id -1 lies outside"):
        TOKENIZER.decode([-1])
    with pytest.raises(ValueError, match="character 2 is the lone surrogate"):
        TOKENIZER.encode("ab\ud800")


def test_batches_encode_like_single_texts():
    for ids, text in zip(TOKENIZER.encode_batch(HARD), HARD, strict=True):
        np.testing.assert_array_equal(ids, TOKENIZER.encode(text))


def test_streaming_holds_back_unfinished_characters():
    stream = StreamDecoder(TOKENIZER)
    ids = TOKENIZER.encode("\U0001f600!")  # four byte tokens and one more
    assert [stream.push([i]) for i in ids] == ["", "", "", "\U0001f600", "!"]
    assert stream.flush() == ""


def test_streaming_equals_decoding_for_every_split_even_of_broken_text():
    draw = random.Random(0)
    for _ in range(100):
        ids = [draw.randrange(TOKENIZER.vocab_size) for _ in range(30)]
        stream, text, start = StreamDecoder(TOKENIZER), "", 0
        while start < len(ids):
            width = draw.randint(1, 4)
            text += stream.push(ids[start : start + width])
            start += width
        assert text + stream.flush() == TOKENIZER.decode(ids)
