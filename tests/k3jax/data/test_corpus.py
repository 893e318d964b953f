"""From files to arrays: complete, cached by content, honest about what it left out."""

import dataclasses
import pathlib

import numpy as np
import pytest

from k3jax.data import dedup, tokenizer
from k3jax.data.baselines import bits_per_byte
from k3jax.data.config import DataConfig
from k3jax.data.corpus import load_corpus
from k3jax.data.pipeline import ValidationBatches
from k3jax.data.text import CorpusError, read_documents


def test_token_arrays_decode_to_the_documents(config):
    corpus = load_corpus(config)
    for documents, arrays in (
        (corpus.train, corpus.train_tokens),
        (corpus.validation, corpus.validation_tokens),
    ):
        assert len(arrays) == len(documents) > 0
        for index, document in enumerate(documents):
            assert corpus.tokenizer.decode_bytes(arrays.document(index)) == document.data
    batches = ValidationBatches(corpus.validation_tokens, corpus.tokenizer.byte_lengths, 2, 32)
    assert batches.total_bytes == sum(document.size for document in corpus.validation)


def test_duplicates_are_dropped_before_the_split_so_none_crosses_it(config, folder):
    for path in list(folder.iterdir()):
        path.with_name(f"copy_of_{path.name}").write_bytes(path.read_bytes())
    corpus = load_corpus(config)
    texts = {d.data for d in corpus.train} | {d.data for d in corpus.validation}
    assert len(corpus.train) + len(corpus.validation) == len(texts) == 40
    assert any("40 near-duplicates" in note for note in corpus.notes)


def test_the_second_start_computes_nothing(config, monkeypatch):
    first = load_corpus(config)

    def refuse(*_, **__):
        raise AssertionError("computed again")

    monkeypatch.setattr(dedup, "find_duplicates", refuse)
    monkeypatch.setattr(tokenizer.Tokenizer, "train", refuse)
    monkeypatch.setattr(tokenizer.Tokenizer, "encode_batch", refuse)
    second = load_corpus(config)
    assert second.manifest == first.manifest
    np.testing.assert_array_equal(second.train_tokens.tokens, first.train_tokens.tokens)


def test_the_tokenizer_depends_on_training_documents_alone(config, folder):
    first = load_corpus(config)
    name = first.validation[0].name
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data.replace(b"return", b"zzzzzz"))
    second = load_corpus(config)
    assert [d.name for d in second.validation] == [d.name for d in first.validation]
    assert second.tokenizer.fingerprint == first.tokenizer.fingerprint


def test_damaged_cache_files_are_made_again_and_said_so(config, folder):
    (folder / "twin.py").write_bytes((folder / "module_00.py").read_bytes())
    first = load_corpus(config)
    files = sorted(config.cache_path.iterdir())
    assert len(files) == 4
    for path in files:
        path.write_bytes(path.read_bytes()[:50])
    second = load_corpus(config)
    assert second.manifest == first.manifest
    assert second.train_tokens.fingerprint == first.train_tokens.fingerprint
    assert sum("is damaged" in note for note in second.notes) == 4
    assert not any("is damaged" in note for note in load_corpus(config).notes)


def test_a_cache_that_cannot_be_written_costs_only_time(config, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    blocked = dataclasses.replace(config, cache_dir=str(tmp_path / "file" / "cache"))
    corpus = load_corpus(blocked)
    assert corpus.manifest == load_corpus(config).manifest
    assert any("cannot be written" in note and "data.cache_dir" in note for note in corpus.notes)


def test_a_small_text_says_that_its_vocabulary_is_smaller(config):
    corpus = load_corpus(dataclasses.replace(config, vocab_size=60_000))
    assert corpus.tokenizer.vocab_size < 60_000
    assert any("of data.vocab_size=60000" in note for note in corpus.notes)


def test_an_empty_corpus_is_refused(tmp_path):
    with pytest.raises(CorpusError, match="data.source"):
        load_corpus(DataConfig(source=str(tmp_path), cache_dir=str(tmp_path / "cache")))


def test_the_standard_library_is_real_text_without_installed_packages(tmp_path):
    documents, _ = read_documents("stdlib", 64)
    names = [document.name for document in documents]
    assert "argparse.py" in names and "json/decoder.py" in names
    assert names == sorted(names)
    assert not any("site-packages" in name or "__pycache__" in name for name in names)
    origin = {document.name: document.data for document in documents}
    assert origin["dataclasses.py"] == pathlib.Path(dataclasses.__file__).read_bytes()

    # The whole way on a slice of it, quick enough for every run of the tests.
    for name in names:
        if name.startswith(("asyncio/", "json/", "email/")):
            path = tmp_path / "text" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(origin[name])
    cfg = DataConfig(
        source=str(tmp_path / "text"),
        vocab_size=1024,
        validation_fraction=0.2,
        cache_dir=str(tmp_path / "cache"),
    )
    corpus = load_corpus(cfg)
    size = sum(document.size for document in corpus.validation)
    assert size / len(corpus.validation_tokens.tokens) > 2.5
    found = bits_per_byte(corpus.train, corpus.validation)
    assert found["xz_concatenated"] < found["xz_per_document"] < found["unigram"] < 8.0
