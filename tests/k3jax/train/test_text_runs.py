"""Whole runs on several sources, on bytes, and resumed from a checkpoint with batches waiting."""

import collections
import dataclasses
import json
import pathlib
import shutil
import threading

import jax
import pytest
from small_runs import with_train

from k3jax.data.prompt import encode_prompt, text_pieces
from k3jax.models.kimi_k3.generate import Generator
from k3jax.models.kimi_k3.sampling import Sampling
from k3jax.parallel.mesh import make_mesh
from k3jax.train import loop
from k3jax.train.metrics import read_records
from k3jax.train.restore import load_model
from k3jax.train.task import make_task


def run(cfg, workdir, **options):
    lines = []
    result = loop.train(cfg, workdir, log=lines.append, **options)
    return result, "\n".join(lines)


def with_data(cfg, **changes):
    return dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, **changes))


@pytest.fixture(scope="module")
def mixed(run_config, tmp_path_factory):
    """The files of `run_config` as two sources, 3 to 1 in rows, 8 to 16 in files."""
    folder = tmp_path_factory.mktemp("mixed")
    for path in sorted(pathlib.Path(run_config.data.source).iterdir()):
        side = folder / ("few" if int(path.stem) < 8 else "many")
        side.mkdir(exist_ok=True)
        shutil.copy(path, side / path.name)
    return with_data(
        run_config,
        source="stdlib",
        sources=(f"few={folder}/few", f"many={folder}/many"),
        weights=("few=0.75", "many=0.25"),
    )


@pytest.fixture(scope="module")
def finished(mixed, tmp_path_factory):
    """(workdir, result, console) of ten steps."""
    workdir = tmp_path_factory.mktemp("finished")
    return workdir, *run(mixed, workdir)


def test_every_source_is_validated_by_name_and_the_total_is_their_sum(finished):
    workdir, result, console = finished
    records = [r for r in read_records(workdir / "metrics.jsonl") if r["kind"] == "validation"]
    assert [r["full"] for r in records] == [False, False, True]
    for record in records:
        assert list(record["sources"]) == ["few", "many"]
        for one in record["sources"].values():
            assert 0 < one["bits_per_byte"] < 9 and one["loss"] > 0
    each = result["sources"]
    assert sum(one["bytes"] for one in each.values()) == result["bytes"]
    assert sum(one["tokens"] for one in each.values()) == result["tokens"]
    for key, weight in (("loss", "tokens"), ("bits_per_byte", "bytes")):
        total = sum(one[key] * one[weight] for one in each.values()) / result[weight]
        assert result[key] == pytest.approx(total)
        assert {n: r[key] for n, r in each.items()} == {
            name: one[key] for name, one in records[-1]["sources"].items()
        }
    assert json.loads((workdir / "result.json").read_text()) == result
    table = console[console.index("by source") :].splitlines()
    assert table[1].split()[0] == "few" and f"{each['few']['bits_per_byte']:.3f}" in table[1]
    assert table[2].split()[0] == "many" and f"{each['many']['bits_per_byte']:.3f}" in table[2]


def test_the_mix_that_is_logged_is_the_one_that_was_trained_on(mixed, finished):
    workdir, result, console = finished
    task = make_task(mixed, str)
    named = [task.documents(n) for n in range(10)]
    for rows, record in (
        (named[:5], next(r for r in read_records(workdir / "metrics.jsonl") if "mix" in r)),
        (named, result),
    ):
        seen = collections.Counter(row[0].split("/")[0] for batch in rows for row in batch)
        assert record["mix"] == {name: seen[name] / seen.total() for name in ("few", "many")}
    assert result["mix"] == {"few": 0.75, "many": 0.25}
    report = json.loads((workdir / "data.json").read_text())
    assert [s["share_of_rows"] for s in report["sources"]] == [0.75, 0.25]
    assert "few: train" in console and "75.0% of the rows" in console


def test_a_run_on_one_source_reports_nothing_by_source(run_config):
    task = make_task(run_config, str)
    assert list(task.validation) == [""] and task.mix(10) == {}


def test_a_run_killed_after_a_checkpoint_reads_on_after_the_last_batch_it_had_used(
    mixed, finished, tmp_path
):
    # The checkpoint of step 5 was written while later batches waited in the thread.
    workdir = shutil.copytree(finished[0], tmp_path / "killed")
    shutil.rmtree(workdir / "checkpoints" / "10")
    result, console = run(with_data(mixed, prefetch=0), workdir)
    assert "at step 5 of 10" in console
    batches = [
        [r["batch"] for r in read_records(folder / "metrics.jsonl") if r["kind"] == "train"]
        for folder in (finished[0], workdir)
    ]
    assert batches[0] == batches[1] and len(set(batches[0])) == 10
    assert result == finished[1]


def test_the_thread_that_builds_batches_ends_with_the_run(mixed, tmp_path):
    run(mixed, tmp_path, until=1)
    assert not [thread for thread in threading.enumerate() if thread.name == "batches-ahead"]


def test_a_run_longer_than_the_epochs_of_all_sources_is_refused_before_it_starts(mixed, tmp_path):
    short = with_data(mixed, epochs=("few=0.1", "many=0.1"))
    with pytest.raises(ValueError, match=r"data.epochs=few=0.1,many=0.1 gives .* takes 40; raise"):
        run(short, tmp_path)
    assert not list(tmp_path.glob("checkpoints/*"))


def test_a_checkpoint_trained_on_bytes_writes_text(run_config, tmp_path):
    cfg = with_data(with_train(run_config, sample_every=0), tokenizer="bytes", vocab_size=4096)
    run(cfg, tmp_path, until=1)
    with jax.set_mesh(make_mesh()):
        loaded = load_model(tmp_path)
        tokenizer = loaded.require_tokenizer()
        assert (tokenizer.vocab_size, tokenizer.merges) == (259, [])
        prompt = encode_prompt(tokenizer, "def ä")
        assert prompt == [1, *(byte + 3 for byte in "def ä".encode())]
        stream = Generator(loaded.cfg, tokenizer.vocab_size).stream(
            loaded.variables, [prompt], 8, Sampling(1.0), jax.random.key(0)
        )
        tokens = list(stream)
        assert all(0 <= int(token[0]) < 259 for token in tokens)
        assert isinstance("".join(text_pieces(tokenizer, tokens)), str)


def test_recall_lists_have_names_too(run_config):
    task = make_task(with_train(run_config, task="recall"), str)
    assert task.documents(4) == [(f"list {n}",) for n in (16, 17, 18, 19)]
