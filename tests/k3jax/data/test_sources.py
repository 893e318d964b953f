"""Sources are named, weighed and bounded by words; a wrong word is refused with the right ones."""

import dataclasses

import pytest

from k3jax import config as configuration
from k3jax.data.config import DataConfig
from k3jax.data.corpus import load_corpus
from k3jax.data.manifest import ManifestError, verify
from k3jax.data.pipeline import TrainBatches
from k3jax.data.report import describe, format_report
from k3jax.data.sources import Source
from k3jax.data.text import CorpusError

TWO = ("open-web=web/*.txt", "code=stdlib")


def test_sources_are_set_by_words_and_survive_the_text_form():
    cfg = configuration.override(
        DataConfig(),
        [
            "sources=open-web=web/*.txt,code=stdlib",
            "weights=open-web=0.7,code=0.3",
            "epochs=code=2",
        ],
    )
    assert cfg.named_sources == (
        Source("open-web", "web/*.txt", 0.7, None),
        Source("code", "stdlib", 0.3, 2.0),
    )
    again = configuration.override(DataConfig(), configuration.to_text(cfg).splitlines())
    assert again == cfg
    assert configuration.from_dict(DataConfig, configuration.to_dict(cfg)) == cfg
    assert DataConfig().named_sources == (Source("", "stdlib"),)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"sources": TWO, "weights": ("open_web=0.7", "code=0.3")},
            ["open_web=0.7", "no source 'open_web'", "open-web, code", "did you mean 'open-web'"],
        ),
        ({"sources": TWO, "epochs": ("cod=1",)}, ["epochs=cod=1", "did you mean 'code'"]),
        ({"sources": TWO, "weights": ("code=1",)}, ["'open-web' has no weight"]),
        ({"sources": TWO, "weights": ("code=0", "open-web=1")}, ["code=0", "positive"]),
        ({"sources": TWO, "weights": ("code=nan", "open-web=1")}, ["code=nan", "positive"]),
        ({"sources": TWO, "weights": ("code=much", "open-web=1")}, ["code=much", "positive"]),
        ({"sources": TWO, "weights": ("code", "open-web=1")}, ["'code' lacks its '='"]),
        ({"sources": (*TWO, "code=x")}, ["'code' comes twice"]),
        ({"sources": ("a b=x",)}, ["a b=x", "letters"]),
        ({"sources": ("a=",)}, ["a=", "LOCATION"]),
        ({"weights": ("code=1",)}, ["data.weights=code=1", "only data.source"]),
        ({"source": "texts", "sources": TWO}, ["data.source='texts'", "beside data.sources"]),
    ],
)
def test_a_mixture_that_means_nothing_is_refused_in_one_line(fields, words):
    with pytest.raises(ValueError) as error:
        DataConfig(**fields)
    message = str(error.value)
    assert all(word in message for word in words) and "\n" not in message, message


@pytest.fixture
def mixed(folder, tmp_path, config):
    """Two sources: ten modules as `code`, thirty as `prose-like`."""
    other = tmp_path / "other"
    other.mkdir()
    for path in sorted(folder.iterdir())[:30]:
        path.rename(other / path.name)
    return dataclasses.replace(
        config,
        source="stdlib",
        sources=(f"code={folder}", f"prose-like={other}"),
        weights=("code=0.7", "prose-like=0.3"),
        validation_fraction=0.2,
    )


def batches_of(cfg, corpus):
    return TrainBatches(
        corpus.train_tokens, 4, cfg.sequence_length, 0, True,
        [(p.source, p.train) for p in corpus.portions], [d.name for d in corpus.train],
    )  # fmt: skip


def test_every_source_is_split_by_itself_and_the_manifest_lists_all(mixed):
    corpus = load_corpus(mixed)
    assert [p.source.name for p in corpus.portions] == ["code", "prose-like"]
    for portion in corpus.portions:
        prefix = portion.source.name + "/"
        assert portion.train and portion.validation
        assert all(corpus.train[i].name.startswith(prefix) for i in portion.train)
        assert all(corpus.validation[i].name.startswith(prefix) for i in portion.validation)
    assert len(corpus.train) == sum(len(p.train) for p in corpus.portions)
    listed = {entry.name for entry in corpus.manifest.documents}
    assert listed == {d.name for d in corpus.train + corpus.validation} and len(listed) == 40
    assert corpus.manifest.config["weights"] == ["code=0.7", "prose-like=0.3"]


def test_a_source_holds_out_the_same_files_under_any_name_and_beside_any_other(mixed, folder):
    alone = load_corpus(dataclasses.replace(mixed, source=str(folder), sources=(), weights=()))
    both = load_corpus(mixed)
    first = both.portions[0].validation
    assert [both.validation[i].name for i in first] == [f"code/{d.name}" for d in alone.validation]


def test_the_tokenizer_learns_from_the_training_text_of_all_sources(mixed):
    corpus = load_corpus(mixed)
    alone = load_corpus(dataclasses.replace(mixed, sources=mixed.sources[:1], weights=()))
    assert corpus.tokenizer.fingerprint != alone.tokenizer.fingerprint
    turned = load_corpus(dataclasses.replace(mixed, sources=mixed.sources[::-1]))
    assert turned.tokenizer.fingerprint == corpus.tokenizer.fingerprint


def test_a_copy_in_a_later_source_is_dropped_so_none_crosses_the_split(mixed, folder, tmp_path):
    for path in sorted(folder.iterdir())[:4]:
        (tmp_path / "other" / f"copy_{path.name}").write_bytes(path.read_bytes())
    corpus = load_corpus(mixed)
    assert [p.duplicates for p in corpus.portions] == [0, 4]
    texts = [d.data for d in corpus.train + corpus.validation]
    assert len(texts) == len(set(texts)) == 40


def test_a_source_of_nothing_but_copies_is_refused_by_name(mixed, folder, tmp_path):
    other = tmp_path / "other"
    for path in list(other.iterdir()):
        path.unlink()
    (other / "copy.py").write_bytes(sorted(folder.iterdir())[0].read_bytes())
    with pytest.raises(CorpusError, match="data.sources=prose-like=.*only near-duplicates"):
        load_corpus(mixed)


def test_a_missing_source_is_refused_by_name(mixed):
    missing = dataclasses.replace(mixed, sources=(mixed.sources[0], "prose-like=no/such"))
    with pytest.raises(CorpusError, match="data.sources=prose-like='no/such' does not exist"):
        load_corpus(missing)


def test_a_changed_document_of_any_source_is_refused_by_name(mixed, tmp_path):
    before = load_corpus(mixed).manifest
    path = tmp_path / "other" / "module_07.py"
    path.write_bytes(path.read_bytes() + b"x = 1\n")
    with pytest.raises(ManifestError, match="'prose-like/module_07.py' has changed"):
        verify(before, load_corpus(mixed).manifest)


def test_the_report_counts_what_each_source_really_gives(mixed):
    cfg = dataclasses.replace(mixed, epochs=("code=0.5",))
    corpus = load_corpus(cfg)
    batches = batches_of(cfg, corpus)
    report = describe(corpus, batches, 1000)
    code, prose = report["sources"]
    rows = [names for n in range(250) for names in batches.documents(n)]
    found = sum(names[0].startswith("code/") for names in rows) / 1000
    assert code["share_of_rows"] == found
    assert prose["share_of_rows"] == pytest.approx(1 - found)
    assert code["epochs"] == pytest.approx(0.5, abs=1 / batches.rows_of(0))  # whole rows
    last = max(i for i, names in enumerate(rows) if names[0].startswith("code/"))
    assert code["ends"] == last + 1 and prose["ends"] is None
    for source, portion in zip(report["sources"], corpus.portions, strict=True):
        mine = [corpus.train[i] for i in portion.train]
        assert source["train"]["documents"] == len(mine)
        assert source["train"]["bytes"] == sum(d.size for d in mine)
        counted = {d.name: len(corpus.tokenizer.encode(d.text)) for d in mine}
        assert source["train"]["tokens"] == sum(counted.values())
        assert source["longest_document"]["tokens"] == max(counted.values())
        assert counted[source["longest_document"]["name"]] == max(counted.values())
        assert source["validation"]["documents"] == len(portion.validation)
    text = format_report(report, 4)
    assert f"code: has given its epochs after row {last + 1} of all" in text
    assert f", in step {last // 4 + 1};" in text
    assert f"{found:.1%} of the rows" in text and "0.50 epochs" in text
