"""The order is a function of the arguments, resumes exactly, and covers everything."""

import hashlib
import itertools
import json

import numpy as np
import pytest

from k3jax.data.pipeline import TrainBatches, ValidationBatches
from k3jax.data.tokens import TokenArrays

# Document d spells ids that occur nowhere else, so every token tells where it comes from.
LENGTHS = [7, 40, 1, 0, 23, 90, 12]
DOCUMENTS = TokenArrays.from_documents(
    [np.arange(n) + 3 + 100 * d for d, n in enumerate(LENGTHS)], 1000
)
BYTE_LENGTHS = np.where(np.arange(1000) < 3, 0, 1 + np.arange(1000) % 5)
ARRAYS = {"tokens", "targets", "segment_ids", "weights", "document_ids"}


def digest(batch: dict) -> str:
    return hashlib.sha256(b"".join(batch[name].tobytes() for name in sorted(batch))).hexdigest()


def take(batches, count: int) -> list[dict]:
    return list(itertools.islice(batches, count))


def test_batches_have_the_promised_arrays():
    batch = next(TrainBatches(DOCUMENTS, 4, 16))
    assert set(batch) == ARRAYS
    assert all(array.shape == (4, 16) for array in batch.values())
    assert batch["weights"].dtype == np.float32
    assert all(batch[name].dtype == np.int32 for name in ARRAYS - {"weights"})


def test_resuming_after_five_batches_gives_batches_six_to_twelve_and_repeats_none():
    straight = [digest(batch) for batch in take(TrainBatches(DOCUMENTS, 2, 8, seed=3), 12)]
    first = TrainBatches(DOCUMENTS, 2, 8, seed=3)
    head = [digest(batch) for batch in take(first, 5)]
    state = json.loads(json.dumps(first.get_state()))
    resumed = TrainBatches(DOCUMENTS, 2, 8, seed=3)
    resumed.set_state(state)
    tail = [digest(batch) for batch in take(resumed, 7)]
    assert head + tail == straight
    assert len(set(straight)) == 12
    # Setting the state of a used iterator rewinds it just the same.
    first.set_state(state)
    assert [digest(batch) for batch in take(first, 7)] == tail


def test_reading_the_state_does_not_disturb_the_order():
    plain, watched = TrainBatches(DOCUMENTS, 2, 8), TrainBatches(DOCUMENTS, 2, 8)
    for _ in range(30):
        watched.get_state()
        assert digest(next(plain)) == digest(next(watched))


@pytest.mark.parametrize("shuffle_rows", [True, False])
def test_each_epoch_reads_every_token_once_in_an_order_of_its_own(shuffle_rows):
    batches = TrainBatches(DOCUMENTS, 1, 16, shuffle_rows=shuffle_rows)
    epochs = []
    for _ in range(3):
        rows = take(batches, batches.rows_per_epoch)
        tokens = np.concatenate([row["tokens"].ravel() for row in rows])
        assert sorted(tokens[tokens > 2].tolist()) == sorted(DOCUMENTS.tokens.tolist())
        assert np.sum(tokens == 1) == np.sum(tokens == 2) == len(LENGTHS)
        epochs.append(tokens.tolist())
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_seed_and_nothing_else_decides_the_order():
    one, same, other = (TrainBatches(DOCUMENTS, 2, 8, seed=s) for s in (0, 0, 1))
    assert digest(next(one)) == digest(next(same)) != digest(next(other))


def test_the_order_is_pinned_so_that_old_runs_resume_on_new_versions():
    rows = take(TrainBatches(DOCUMENTS, 1, 16, seed=0), 3)
    assert [row["document_ids"][0, [0, -1]].tolist() for row in rows] == [[5, 6], [1, 0], [5, 5]]


def test_a_state_of_another_sequence_is_refused_by_name():
    state = TrainBatches(DOCUMENTS, 2, 8, seed=3).get_state()
    fewer = TokenArrays.from_documents([DOCUMENTS.document(0)], 1000)
    for name, other in {
        "seed": TrainBatches(DOCUMENTS, 2, 8, seed=4),
        "batch_size": TrainBatches(DOCUMENTS, 3, 8, seed=3),
        "sequence_length": TrainBatches(DOCUMENTS, 2, 9, seed=3),
        "shuffle_rows": TrainBatches(DOCUMENTS, 2, 8, seed=3, shuffle_rows=False),
        "documents": TrainBatches(fewer, 2, 8, seed=3),
    }.items():
        with pytest.raises(ValueError, match=f"state has {name}=.*restore {name} or start"):
            other.set_state(state)


@pytest.mark.parametrize(("B", "T"), [(1, 2), (4, 16), (3, 64), (2, 1000)])
def test_validation_spells_every_byte_once_and_pads_the_last_batch(B, T):
    batches = ValidationBatches(DOCUMENTS, BYTE_LENGTHS, B, T)
    seen = list(batches)
    assert len(seen) == len(batches)
    assert all(batch[name].shape == (B, T) for batch in seen for name in ARRAYS)
    flat = {name: np.concatenate([b[name].ravel() for b in seen]) for name in ARRAYS}
    targets = flat["targets"][flat["weights"] > 0]
    assert targets[targets > 2].tolist() == DOCUMENTS.tokens.tolist()
    assert batches.total_bytes == BYTE_LENGTHS[DOCUMENTS.tokens].sum()
    assert flat["weights"].sum() == sum(LENGTHS) + len(LENGTHS)
    assert not flat["weights"][flat["segment_ids"] == 0].any()
    assert [digest(batch) for batch in batches] == [digest(batch) for batch in seen]


def test_a_quick_look_counts_the_bytes_it_covers():
    batches = ValidationBatches(DOCUMENTS, BYTE_LENGTHS, 2, 8, max_batches=3)
    seen = list(batches)
    assert len(seen) == len(batches) == 3
    covered = [b["targets"][b["weights"] > 0] for b in seen]
    assert batches.total_bytes == sum(BYTE_LENGTHS[ids].sum() for ids in covered)
    everything = ValidationBatches(DOCUMENTS, BYTE_LENGTHS, 2, 8, max_batches=1000)
    assert everything.total_bytes == BYTE_LENGTHS[DOCUMENTS.tokens].sum()


def test_sizes_that_cannot_work_are_refused():
    nothing = TokenArrays.from_documents([], 1000)
    for make, word in (
        (lambda: TrainBatches(DOCUMENTS, 0, 8), "batch_size=0"),
        (lambda: TrainBatches(DOCUMENTS, 1, 1), "sequence_length=1"),
        (lambda: TrainBatches(nothing, 1, 8), "no documents"),
        (lambda: ValidationBatches(DOCUMENTS, BYTE_LENGTHS, 0, 8), "batch_size=0"),
        (lambda: ValidationBatches(DOCUMENTS, BYTE_LENGTHS, 1, 8, -1), "max_batches=-1"),
        (lambda: ValidationBatches(nothing, BYTE_LENGTHS, 1, 8), "no documents"),
    ):
        with pytest.raises(ValueError, match=word):
            make()
