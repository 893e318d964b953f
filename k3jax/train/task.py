"""What a run learns and what it is judged by: text from files, or generated recall lists."""

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from k3jax.data import baselines, manifest, report
from k3jax.data.corpus import Corpus, load_corpus
from k3jax.data.iterator import ResumableBatches
from k3jax.data.pipeline import TrainBatches, ValidationBatches
from k3jax.data.synthetic import RecallBatches
from k3jax.data.tokenizer import Tokenizer
from k3jax.models.kimi_k3.evaluate import Part
from k3jax.train.config import RunConfig
from k3jax.train.workdir import write_whole

# Far from any data.seed in use: recall lists of validation are never those of training.
_VALIDATION_SEED = 1 << 40


@dataclasses.dataclass(frozen=True)
class Task:
    """Everything the loop needs to know of the data.

    Attributes:
      batches: Endless training batches, resumable.
      probe: A fixed part of validation by source, for a look during training.
      validation: All of it, for the end.
      corpus: The text; None for recall.
      report: What `k3jax.data.report` says of the text; empty for recall.
    """

    batches: ResumableBatches
    probe: Mapping[str, Part]
    validation: Mapping[str, Part]
    corpus: Corpus | None = None
    report: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, None where there is no text."""
        return self.corpus.tokenizer if self.corpus else None

    def documents(self, batch: int) -> list[tuple[str, ...]]:
        """Names of the documents in each row of training batch number `batch`, from 0."""
        return self.batches.documents(batch)

    def mix(self, step: int) -> dict[str, Any]:
        """{"mix": share of the rows by source} after `step` updates; empty for one source."""
        if not isinstance(self.batches, TrainBatches) or len(self.validation) == 1:
            return {}
        rows = step * self.batches.batch_size
        counts = self.batches.mixture.counts(rows)
        shares = {n: c / max(rows, 1) for n, c in zip(self.validation, counts, strict=True)}
        return {"mix": shares}

    def save_report(self, path: pathlib.Path) -> None:
        """Writes `report` as JSON; nothing where there is no text."""
        if self.report:
            write_whole(path, json.dumps(self.report, indent=1) + "\n")

    def records(self) -> dict[str, Any]:
        """What a checkpoint stores of the data, as JSON values."""
        if self.corpus is None:
            return {"manifest": {}, "tokenizer": {}}
        tokenizer = self.corpus.tokenizer
        return {
            "manifest": self.corpus.manifest.to_fields(),
            "tokenizer": {"fingerprint": tokenizer.fingerprint, "merges": tokenizer.merges},
        }

    def verify(self, stored: dict) -> None:
        """Refuses a stored manifest that describes another text than the present one."""
        if self.corpus is None:
            return
        manifest.verify(manifest.Manifest.from_fields(stored), self.corpus.manifest)

    def baselines(self) -> dict[str, float]:
        """Bits per byte of simple predictors of the validation text; empty without text."""
        if self.corpus is None:
            return {}
        return baselines.bits_per_byte(self.corpus.train, self.corpus.validation)


def read_tokenizer(record: dict) -> Tokenizer | None:
    """The tokenizer that `Task.records` stored, None where there was none.

    Raises:
      ValueError: this code's tokenizer would give other ids for the same merges.
    """
    if not record:
        return None
    tokenizer = Tokenizer(tuple(pair) for pair in record["merges"])
    if tokenizer.fingerprint != record["fingerprint"]:
        raise ValueError(
            f"stored tokenizer {record['fingerprint'][:12]} reads as {tokenizer.fingerprint[:12]}: "
            "the tokenizer's code has changed since; use the version that wrote the checkpoint"
        )
    return tokenizer


def make_task(
    cfg: RunConfig, log: Callable[[str], None], tokenizer: Tokenizer | None = None
) -> Task:
    """Loads or generates the data of a run and logs what it is.

    Args:
      cfg: The run.
      log: Receives the report.
      tokenizer: To use instead of one learnt from the text: that of the weights to start from.

    Raises:
      ValueError: the corpus is missing, empty or too small, or sizes do not fit.
    """
    return _text(cfg, log, tokenizer) if cfg.train.task == "text" else _recall(cfg, log)


def _text(cfg: RunConfig, log: Callable[[str], None], tokenizer: Tokenizer | None) -> Task:
    if tokenizer is not None and tokenizer.vocab_size > cfg.model.vocab_size:
        raise ValueError(
            f"the tokenizer of train.init_from has {tokenizer.vocab_size} ids, model.vocab_size="
            f"{cfg.model.vocab_size} has too few; give the model that folder's configuration"
        )
    corpus = load_corpus(cfg.data, tokenizer)
    data, train = cfg.data, cfg.train
    batches = TrainBatches(
        corpus.train_tokens, train.batch_size, data.sequence_length, data.seed, data.shuffle_rows,
        [(p.source, p.train) for p in corpus.portions] if data.sources else (),
        [document.name for document in corpus.train],
    )  # fmt: skip
    rows, last = train.steps * train.batch_size, batches.mixture.rows
    if last is not None and last < rows:
        raise ValueError(
            f"data.epochs={','.join(data.epochs)} gives {last} rows, train.steps={train.steps} x "
            f"train.batch_size={train.batch_size} takes {rows}; raise the epochs, bound fewer "
            "sources or train fewer steps"
        )

    def parts(max_batches: int | None) -> dict[str, Part]:
        found = {}
        for portion in corpus.portions:
            found[portion.source.name] = _part(ValidationBatches(
                corpus.validation_tokens.part(portion.validation), corpus.tokenizer.byte_lengths,
                train.eval_batch_size, train.eval_sequence_length or data.sequence_length,
                max_batches,
            ))  # fmt: skip
        return found

    found = report.describe(corpus, batches, rows)
    log(report.format_report(found, train.batch_size))
    return Task(batches, parts(train.eval_batches), parts(None), corpus, found)


def _part(batches: ValidationBatches) -> Part:
    return Part(lambda: iter(batches), batches.total_bytes)


def _recall(cfg: RunConfig, log: Callable[[str], None]) -> Task:
    data, train = cfg.data, cfg.train
    log(f"no text: generated lists of {train.recall_pairs} pairs to recall")

    def lists(batch_size: int, seed: int) -> RecallBatches:
        return RecallBatches(
            cfg.model.vocab_size, batch_size, data.sequence_length, train.recall_pairs, seed
        )

    def held_out() -> Iterator[dict[str, np.ndarray]]:
        endless = lists(train.eval_batch_size, data.seed + _VALIDATION_SEED)
        return itertools.islice(endless, train.eval_batches)

    parts = {"": Part(held_out, 0)}
    return Task(lists(train.batch_size, data.seed), parts, parts)
