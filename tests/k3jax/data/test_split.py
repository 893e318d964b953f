"""The split is by file, follows names, comes near the wanted size, and leaves nothing out."""

import random

import pytest

from k3jax.data.split import split_documents
from k3jax.data.text import CorpusError, Document


def documents(count: int = 200) -> list[Document]:
    draw = random.Random(0)
    return [
        Document(f"file_{i:03d}.py", f"line {i}\n".encode() * draw.randint(10, 200))
        for i in range(count)
    ]


def names(split: list[Document]) -> set[str]:
    return {document.name for document in split}


def test_every_file_is_on_one_side_and_validation_has_about_the_wanted_bytes():
    files = documents()
    train, validation, notes = split_documents(files, 0.1, 0, 1 << 20)
    assert names(train) | names(validation) == names(files)
    assert not names(train) & names(validation)
    share = sum(d.size for d in validation) / sum(d.size for d in files)
    assert 0.09 <= share <= 0.11
    assert notes == []


def test_the_seed_decides_and_a_new_file_moves_few_others():
    files = documents()
    chosen = names(split_documents(files, 0.1, 0, 1 << 20)[1])
    assert chosen == names(split_documents(files[::-1], 0.1, 0, 1 << 20)[1])
    assert chosen != names(split_documents(files, 0.1, 1, 1 << 20)[1])
    more = [*files, Document("new.py", b"line\n" * 100)]
    assert len(chosen ^ names(split_documents(more, 0.1, 0, 1 << 20)[1])) <= 4


def test_a_long_file_is_cut_at_line_ends_without_loss_and_stays_on_one_side():
    files = [*documents(20), Document("long.txt", "0123456789é\n".encode() * 1000)]
    train, validation, _ = split_documents(files, 0.2, 0, 1024)
    for split in (train, validation):
        pieces = [d for d in split if d.name.startswith("long.txt@")]
        if pieces:
            assert b"".join(d.data for d in pieces) == files[-1].data
            assert all(d.size <= 1024 and d.data.endswith(b"\n") for d in pieces)
            offsets = [int(d.name.split("@")[1]) for d in pieces]
            assert offsets == [sum(d.size for d in pieces[:i]) for i in range(len(pieces))]
    assert not {n.split("@")[0] for n in names(train)} & {
        n.split("@")[0] for n in names(validation)
    }


@pytest.mark.parametrize("data", [b"a line of text\n" * 500, "é".encode() * 4000])
def test_a_single_file_gives_its_end_to_validation_and_says_so(data):
    train, validation, notes = split_documents([Document("book.txt", data)], 0.1, 0, 2048)
    assert b"".join(d.data for d in train + validation) == data
    assert sum(d.size for d in validation) == pytest.approx(0.1 * len(data), rel=0.02)
    assert validation[0].name == f"book.txt@{sum(d.size for d in train)}"
    for document in train + validation:
        document.data.decode("utf-8")
    assert "validation is the end of book.txt" in notes[0]


def test_a_corpus_too_small_to_split_is_refused():
    with pytest.raises(CorpusError, match="1 bytes of text.*validation_fraction=0.1"):
        split_documents([Document("tiny.txt", b"x")], 0.1, 0, 1024)
