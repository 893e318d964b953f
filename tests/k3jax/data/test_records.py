"""Records are read field by field, and a bad one is refused by file and number."""

import dataclasses
import gzip
import json
import sys

import numpy as np
import pytest
from small_texts import module_source

from k3jax.data.config import DataConfig
from k3jax.data.corpus import load_corpus
from k3jax.data.pipeline import TrainBatches
from k3jax.data.records import Fields
from k3jax.data.report import describe
from k3jax.data.split import split_documents
from k3jax.data.text import CorpusError, Document, read_documents

TEXTS = ["first\n", "zwei ä\r\n", "three \0 \U0001f600", "four"]


def lines(records) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def write_parquet(path, columns):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path, row_group_size=2)


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".parquet"])
def test_every_record_is_a_document_with_its_exact_text(tmp_path, ending):
    path = tmp_path / f"data{ending}"
    rows = [{"body": text, "id": i} for i, text in enumerate(TEXTS)]
    if ending == ".parquet":
        write_parquet(path, {"id": [0, 1, 2, 3], "body": TEXTS})
    else:
        path.write_bytes(gzip.compress(lines(rows)) if ending.endswith("gz") else lines(rows))
    # As a file, in a folder and by a glob.
    for source in (path, tmp_path, tmp_path / "*"):
        documents, notes = read_documents(str(source), 0, Fields("body"))
        assert [d.data.decode() for d in documents] == TEXTS
        assert [d.name for d in documents] == [f"data{ending}:{n}" for n in (1, 2, 3, 4)]
        assert notes == []


def test_blank_lines_count_but_are_no_records_and_short_ones_are_left_out(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\n{"text": "long enough"}\n  \n{"text": "x"}\n{"text": "no line end"}')
    documents, notes = read_documents(str(path), 5)
    assert [d.name for d in documents] == ["a.jsonl:2", "a.jsonl:5"]
    assert notes == ["left out: 1 records shorter than min_document_bytes=5"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", ["line 2", "not JSON"]),
        (b'{"text": "\xff"}', ["line 2", "not JSON in UTF-8"]),
        (b"[" * 100_000, ["line 2", "not JSON"]),
        (b'["text"]', ["line 2 holds a list", "object"]),
        (b'{"body": "x", "id": 3}', ["line 2 has no 'text'", "it has body, id", "data.text_field"]),
        (b'{"text": null}', ["line 2", "'text' is 'None'", "text"]),
        (b'{"text": 5}', ["line 2", "a int"]),
        (b'{"text": "\\ud800"}', ["line 2", "UTF-8"]),
    ],
)
def test_a_bad_line_is_refused_by_file_and_line(tmp_path, line, words):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(CorpusError) as error:
        read_documents(str(path))
    message = str(error.value)
    assert "bad.jsonl" in message and "\n" not in message
    assert all(word in message for word in words), message


def test_damaged_files_are_refused_not_left_out(tmp_path):
    packed = gzip.compress(lines({"text": text * 50} for text in TEXTS))
    (tmp_path / "cut.jsonl.gz").write_bytes(packed[:-20])
    with pytest.raises(CorpusError, match="cut.jsonl.gz cannot be read to its end"):
        read_documents(str(tmp_path / "cut.jsonl.gz"))
    (tmp_path / "no.parquet").write_bytes(b"no such thing")
    with pytest.raises(CorpusError, match="no.parquet is no whole Parquet file"):
        read_documents(str(tmp_path / "no.parquet"))


def test_parquet_names_the_columns_present_and_the_row_without_text(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path, {"body": ["a", None], "id": [1, 2]})
    with pytest.raises(CorpusError, match=r"a.parquet has no 'text', it has body, id; set data"):
        read_documents(str(path))
    with pytest.raises(CorpusError, match="a.parquet row 2: 'body' is 'None'"):
        read_documents(str(path), 0, Fields("body"))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(CorpusError, match=r"need the package pyarrow; install it"):
        read_documents(str(tmp_path))


def conversations(count: int):
    """Four messages each, all different."""
    return [
        {"conversation": c, "text": module_source(100 + 4 * c + m, lines=8)}
        for c in range(count)
        for m in range(4)
    ]


def test_a_whole_conversation_stands_on_one_side_of_the_split(tmp_path):
    (tmp_path / "chat.jsonl").write_bytes(lines(conversations(12)))
    cfg = DataConfig(
        source=str(tmp_path / "chat.jsonl"),
        vocab_size=300,
        validation_fraction=0.25,
        cache_dir=str(tmp_path / "cache"),
    )
    grouped = load_corpus(dataclasses.replace(cfg, group_field="conversation"))
    sides = [{d.group for d in side} for side in (grouped.train, grouped.validation)]
    assert sides[0] and sides[1] and not sides[0] & sides[1]
    assert len(grouped.train) == 4 * len(sides[0])
    assert len(grouped.train) + len(grouped.validation) == 48
    (source,) = describe(grouped, TrainBatches(grouped.train_tokens, 1, 32), 10)["sources"]
    assert (source["groups"], source["groups_on_both_sides"]) == (12, 0)
    # Without the field the messages of a conversation are split: the rule is what keeps them.
    plain = load_corpus(cfg)
    train, validation = (
        {(int(document.name.split(":")[1]) - 1) // 4 for document in side}
        for side in (plain.train, plain.validation)
    )
    assert train & validation


def test_a_conversation_is_never_cut_to_fill_validation():
    one = [Document(f"m{i}", b"some text\n" * 100, "conversation=1") for i in range(4)]
    with pytest.raises(CorpusError, match="has 1 groups, too few"):
        split_documents(one, 0.1, 0, 1 << 20)
    long = [dataclasses.replace(d, group=f"g{i}") for i, d in enumerate(one)]
    train, validation, _ = split_documents(long, 0.25, 0, 1024)
    assert {d.group for d in train}.isdisjoint(d.group for d in validation)
    assert all(d.group for d in train + validation)


@pytest.mark.parametrize(
    ("record", "word"),
    [({"text": "a"}, "line 1 has no 'c'"), ({"text": "a", "c": None}, "'c' is None: a group is")],
)
def test_a_record_without_its_group_is_refused(tmp_path, record, word):
    (tmp_path / "a.jsonl").write_bytes(lines([record]))
    with pytest.raises(CorpusError, match=word):
        read_documents(str(tmp_path), 0, Fields("text", "c"))


def test_bytes_are_the_ids_of_a_tokenizer_without_merges(config):
    cfg = dataclasses.replace(config, tokenizer="bytes")
    corpus = load_corpus(cfg)
    assert corpus.tokenizer.vocab_size == cfg.largest_vocabulary == 259
    assert not any("vocabulary" in note for note in corpus.notes)
    data = np.frombuffer(b"".join(d.data for d in corpus.train), np.uint8)
    np.testing.assert_array_equal(corpus.train_tokens.tokens, data + np.uint16(3))
    text = "ä\0\U0001f600 <|eos|>"
    quick = corpus.tokenizer.encode(text)
    library = corpus.tokenizer._library.encode(text, add_special_tokens=False).ids
    assert quick.tolist() == library and corpus.tokenizer.decode(quick) == text
