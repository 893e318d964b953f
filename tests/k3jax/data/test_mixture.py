"""Shares of a mixture hold at any time, follow from the index alone, and end where they must."""

import collections
import itertools
import json
import random
import zlib

import numpy as np
import pytest

from k3jax.data.corpus import load_corpus
from k3jax.data.mixture import Mixture
from k3jax.data.pipeline import TrainBatches, ValidationBatches
from k3jax.data.sources import Source
from k3jax.data.tokens import TokenArrays

# Source s has the documents in PARTS[s]; document d spells ids from 100 d on.
DOCUMENTS = TokenArrays.from_documents([np.arange(40 + d) + 100 * d + 3 for d in range(12)], 2000)
PARTS = [range(0, 6), range(6, 10), range(10, 12)]


def mixture(weights=(0.7, 0.2, 0.1), epochs=(None, None, None), seed=0, batch_size=4):
    sources = [
        (Source(name, name, weight, bound), part)
        for name, weight, bound, part in zip("abc", weights, epochs, PARTS, strict=True)
    ]
    names = [f"file_{d}" for d in range(12)]
    return TrainBatches(DOCUMENTS, batch_size, 16, seed, True, sources, names)


def source_of(row: np.ndarray) -> int:
    """The source of a row's document_ids; all of them must agree."""
    (source,) = {s for s, part in enumerate(PARTS) for d in row[row >= 0] if d in part}
    return source


def digest(batch: dict) -> str:
    return f"{zlib.crc32(b''.join(batch[name].tobytes() for name in sorted(batch))):08x}"


def take(batches, count):
    return list(itertools.islice(batches, count))


@pytest.mark.parametrize(
    "weights", [[0.7, 0.3], [1, 1, 1], [0.9, 0.05, 0.03, 0.02], [3.0], [1e-6, 1.0], [5] * 20]
)
def test_realised_shares_are_within_a_few_rows_of_the_weights_at_any_time(weights):
    for seed in range(3):
        mix = Mixture(weights, [None] * len(weights), seed)
        wanted = np.array(weights) / sum(weights)
        seen = np.zeros(len(weights), int)
        for row in range(1000):
            source, place = mix.locate(row)
            assert place == seen[source]
            seen[source] += 1
            assert np.max(np.abs(seen - wanted * (row + 1))) < 4
        assert mix.counts(1000) == seen.tolist()
        assert np.max(np.abs(seen / 1000 - wanted)) < 0.01


def test_any_row_is_found_without_walking_to_it():
    mix = Mixture([0.7, 0.2, 0.1], [None] * 3, 5)
    far = 10**15
    before, after = mix.counts(far), mix.counts(far + 1)
    source, place = mix.locate(far)
    assert sum(before) == far and sum(after) == far + 1
    assert place == before[source] == after[source] - 1
    np.testing.assert_allclose(np.array(before) / far, [0.7, 0.2, 0.1], atol=1e-9)


def test_the_seed_and_nothing_else_decides_which_row_is_whose():
    def order(seed):
        mix = Mixture([0.5, 0.3, 0.2], [None] * 3, seed)
        return [mix.locate(row)[0] for row in range(200)]

    assert order(1) == order(1) != order(2)


def test_a_bounded_source_ends_and_the_others_share_its_rows_by_weight():
    draw = random.Random(0)
    for trial in range(20):
        weights = [draw.uniform(0.1, 1.0) for _ in range(3)]
        limits = [draw.randint(1, 200), draw.randint(1, 200), None]
        mix = Mixture(weights, limits, trial)
        seen, active = [0, 0, 0], {0, 1, 2}
        for row in range(2000):
            source, place = mix.locate(row)
            assert source in active and place == seen[source]
            seen[source] += 1
            if seen[source] == limits[source]:
                active.discard(source)
                assert (source, row + 1) in mix.ends
        assert seen[:2] == limits[:2] and active == {2} and mix.rows is None
        start = max(end for _, end in mix.ends)
        first = min(end for _, end in mix.ends)
        left = [s for s in range(3) if (s, first) not in mix.ends]
        between = np.array(mix.counts(start)) - mix.counts(first)
        share = weights[left[0]] / (weights[left[0]] + weights[left[1]])
        assert abs(between[left[0]] - share * (start - first)) < 4


def test_when_every_source_has_ended_the_next_row_is_refused():
    mix = Mixture([1.0, 1.0], [3, 5], 0)
    found = collections.Counter(mix.locate(row)[0] for row in range(8))
    assert mix.rows == 8 and found == {0: 3, 1: 5}
    with pytest.raises(ValueError, match="row 8: every source has given its epochs after 8 rows"):
        mix.locate(8)


def test_a_row_holds_documents_of_one_source_and_the_mix_is_that_of_the_weights():
    batches = mixture()
    rows = [row for batch in take(batches, 250) for row in batch["document_ids"]]
    found = np.bincount([source_of(row) for row in rows], minlength=3)
    assert found.tolist() == batches.mixture.counts(1000)
    np.testing.assert_allclose(found / 1000, [0.7, 0.2, 0.1], atol=0.01)


def test_each_source_reads_every_token_once_in_each_of_its_own_epochs():
    batches = mixture(weights=(1.0, 2.0, 3.0), batch_size=1)
    tokens, rows = {0: [], 1: [], 2: []}, collections.Counter()
    for batch in take(batches, 150):
        source = source_of(batch["document_ids"][0])
        rows[source] += 1
        if rows[source] <= batches.rows_of(source):
            tokens[source] += batch["tokens"][batch["tokens"] > 2].tolist()
    for source, part in enumerate(PARTS):
        assert rows[source] >= batches.rows_of(source)
        assert sorted(tokens[source]) == DOCUMENTS.part(part).tokens.tolist()


def test_without_weights_each_source_has_its_share_by_size():
    batches = mixture(weights=(None, None, None))
    whole = batches.rows_per_epoch
    sizes = [batches.rows_of(source) for source in range(3)]
    assert sum(sizes) == whole
    assert np.max(np.abs(np.array(batches.mixture.counts(whole)) - sizes)) <= 2


def test_a_mixture_resumes_exactly_even_across_the_end_of_a_source():
    bounds = (None, 1.0, 0.5)
    straight = [digest(batch) for batch in take(mixture(epochs=bounds), 60)]
    ends = mixture(epochs=bounds).mixture.ends
    assert len(ends) == 2 and all(4 < end < 240 for _, end in ends)
    for stop in (1, 7, 20, 45):
        first = mixture(epochs=bounds)
        assert [digest(batch) for batch in take(first, stop)] == straight[:stop]
        state = json.dumps(first.get_state())
        assert len(state) < 1000
        resumed = mixture(epochs=bounds)
        resumed.set_state(json.loads(state))
        assert [digest(batch) for batch in take(resumed, 60 - stop)] == straight[stop:]


def test_a_state_of_another_mixture_is_refused():
    state = json.loads(json.dumps(mixture().get_state()))
    for other in (mixture(weights=(0.6, 0.3, 0.1)), mixture(epochs=(None, 2.0, None))):
        with pytest.raises(ValueError, match="state has sources=.*restore sources or start"):
            other.set_state(state)


def test_documents_of_a_batch_are_named_row_by_row_in_order():
    batches = mixture()
    for index, batch in enumerate(take(mixture(), 20)):
        named = batches.documents(index)
        assert len(named) == 4
        for names, ids in zip(named, batch["document_ids"], strict=True):
            changes = ids[np.flatnonzero(np.diff(ids, prepend=-2))]
            assert names == tuple(f"file_{d}" for d in changes if d >= 0)
    # Naming moves nothing: the first batch is still to come.
    assert digest(next(batches)) == digest(next(mixture()))
    with pytest.raises(ValueError, match="batch_index=-1"):
        batches.documents(-1)


def test_a_single_source_keeps_the_batches_it_had_before_there_were_mixtures(config):
    # Recorded with the code before mixtures, from the very corpus of conftest.
    corpus = load_corpus(config)
    assert corpus.tokenizer.fingerprint.startswith("79ddfa844f3c3b83")
    assert corpus.train_tokens.fingerprint.startswith("ecef67c5f4fff47b")
    assert corpus.validation_tokens.fingerprint.startswith("e7aa499f945ff872")
    batches = TrainBatches(corpus.train_tokens, 4, 32, 0, True)
    expected = ["1a37fb25", "88dda3d4", "c998bd69", "ad5b11d7", "cb823c33", "3a7f74f7"]
    assert [digest(batch) for batch in take(batches, 6)] == expected
    assert set(batches.get_state()) == {
        "version", "batch_size", "documents", "sequence_length", "seed", "shuffle_rows", "position"
    }  # fmt: skip
    take(batches, 3000)
    assert digest(next(batches)) == "8ee70c2f"
    plain = TrainBatches(corpus.train_tokens, 4, 32, 7, False)
    assert [digest(batch) for batch in take(plain, 3)] == ["3befcb6c", "dc047f87", "2939592a"]
    held_out = ValidationBatches(corpus.validation_tokens, corpus.tokenizer.byte_lengths, 2, 64)
    assert [digest(batch) for batch in take(held_out, 3)] == ["b437fc0a", "7992ba80", "477cc4b7"]
