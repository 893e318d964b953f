"""A manifest survives JSON, and any other corpus is refused by the first difference."""

import dataclasses
import json

import pytest

from k3jax.data.corpus import load_corpus
from k3jax.data.manifest import Manifest, ManifestError, verify


def test_a_manifest_describes_everything_and_round_trips(config, folder, tmp_path):
    (folder / "twin.py").write_bytes((folder / "module_00.py").read_bytes())
    corpus = load_corpus(config)
    loaded = Manifest.from_fields(json.loads(json.dumps(corpus.manifest.to_fields())))
    assert loaded == corpus.manifest
    assert [(d.name, d.kept) for d in loaded.duplicates] == [("twin.py", "module_00.py")]
    assert len(loaded.documents) == 40
    assert {entry.split for entry in loaded.documents} == {"train", "validation"}
    assert all(len(entry.sha256) == 64 and entry.size > 0 for entry in loaded.documents)
    assert loaded.tokenizer == corpus.tokenizer.fingerprint
    assert loaded.config["vocab_size"] == 400 and "cache_dir" not in loaded.config
    elsewhere = dataclasses.replace(config, cache_dir=str(tmp_path / "other"))
    verify(loaded, load_corpus(elsewhere).manifest)


def change(folder):
    path = folder / "module_07.py"
    path.write_bytes(path.read_bytes() + b"x = 1\n")


def remove(folder):
    (folder / "module_07.py").unlink()


def add(folder):
    (folder / "zzz.py").write_text("entirely = 'new and different text, long enough to stay'\n" * 2)


@pytest.mark.parametrize(
    ("edit", "name", "what"),
    [
        (change, "module_07.py", "has changed"),
        (remove, "module_07.py", "is missing now"),
        (add, "zzz.py", "is new"),
    ],
)
def test_a_changed_missing_or_new_document_is_named(config, folder, edit, name, what):
    # The largest share of documents must stay on its side, so that only the edit is reported.
    manifest = load_corpus(config).manifest
    edit(folder)
    with pytest.raises(ManifestError, match=f"{name}.*{what}.*new --workdir") as error:
        verify(manifest, load_corpus(config).manifest)
    assert "\n" not in str(error.value)


def test_a_document_on_the_other_side_of_the_split_is_named(config):
    manifest = load_corpus(config).manifest
    moved = load_corpus(dataclasses.replace(config, split_seed=config.split_seed + 1))
    with pytest.raises(ManifestError, match="was in .* and is in .* now"):
        verify(manifest, moved.manifest)


def test_another_tokenizer_is_refused(config):
    manifest = load_corpus(config).manifest
    with pytest.raises(ManifestError, match="tokenizer .* restore data.vocab_size=400"):
        verify(manifest, load_corpus(dataclasses.replace(config, vocab_size=300)).manifest)


@pytest.mark.parametrize("fields", [{}, {"documents": [1], "duplicates": []}, {"documents": []}])
def test_fields_that_are_no_manifest_are_refused(fields):
    with pytest.raises(ManifestError, match="damaged .*new --workdir"):
        Manifest.from_fields(fields)


def test_a_manifest_of_another_version_is_refused(config):
    fields = {**load_corpus(config).manifest.to_fields(), "version": 99}
    with pytest.raises(ManifestError, match="version 99"):
        Manifest.from_fields(fields)
