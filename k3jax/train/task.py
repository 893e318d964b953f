"""What a run learns and what it is judged by: text from files, or generated recall lists."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from k3jax.data import baselines, manifest
from k3jax.data.corpus import Corpus, load_corpus
from k3jax.data.iterator import ResumableBatches
from k3jax.data.pipeline import TrainBatches, ValidationBatches
from k3jax.data.synthetic import RecallBatches
from k3jax.data.tokenizer import Tokenizer
from k3jax.train.config import RunConfig

# Far from any data.seed in use: recall lists of validation are never those of training.
_VALIDATION_SEED = 1 << 40


@dataclasses.dataclass(frozen=True)
class Part:
    """A validation set: `batches()` starts anew each time; `size` is its bytes of text, or 0."""

    batches: Callable[[], Iterator[dict[str, np.ndarray]]]
    size: int


@dataclasses.dataclass(frozen=True)
class Task:
    """Everything the loop needs to know of the data.

    Attributes:
      batches: Endless training batches, resumable.
      probe: A fixed part of validation, for a look during training.
      validation: All of it, for the end.
      corpus: The text; None for recall.
    """

    batches: ResumableBatches
    probe: Part
    validation: Part
    corpus: Corpus | None = None

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, None where there is no text."""
        return self.corpus.tokenizer if self.corpus else None

    def documents(self, batch: int) -> list[list[str]]:
        """Names of the documents in each row of training batch number `batch`."""
        rows = self.batches.document_ids(batch)
        if self.corpus is None:
            return [
                [f"list {index}"] for index in range(batch * len(rows), (batch + 1) * len(rows))
            ]
        return [[self.corpus.train[index].name for index in row] for row in rows]

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


def make_task(cfg: RunConfig, log: Callable[[str], None]) -> Task:
    """Loads or generates the data of a run.

    Raises:
      ValueError: the corpus is missing, empty or too small, or sizes do not fit.
    """
    return _text(cfg, log) if cfg.train.task == "text" else _recall(cfg)


def _text(cfg: RunConfig, log: Callable[[str], None]) -> Task:
    corpus = load_corpus(cfg.data)
    log(corpus.summary())
    data, train = cfg.data, cfg.train

    def part(max_batches: int | None) -> Part:
        batches = ValidationBatches(
            corpus.validation_tokens, corpus.tokenizer.byte_lengths, train.eval_batch_size,
            train.eval_sequence_length or data.sequence_length, max_batches,
        )  # fmt: skip
        return Part(lambda: iter(batches), batches.total_bytes)

    batches = TrainBatches(
        corpus.train_tokens, train.batch_size, data.sequence_length, data.seed, data.shuffle_rows
    )
    return Task(batches, part(train.eval_batches), part(None), corpus)


def _recall(cfg: RunConfig) -> Task:
    data, train = cfg.data, cfg.train

    def lists(batch_size: int, seed: int) -> RecallBatches:
        return RecallBatches(
            cfg.model.vocab_size, batch_size, data.sequence_length, train.recall_pairs, seed
        )

    def held_out() -> Iterator[dict[str, np.ndarray]]:
        endless = lists(train.eval_batch_size, data.seed + _VALIDATION_SEED)
        return itertools.islice(endless, train.eval_batches)

    part = Part(held_out, 0)
    return Task(lists(train.batch_size, data.seed), part, part)
