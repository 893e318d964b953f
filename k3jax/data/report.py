"""What a run will read, before it reads it: sizes, shares and what was dropped, by source."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from k3jax.data.corpus import Corpus, Portion
from k3jax.data.pipeline import TrainBatches
from k3jax.data.text import Document
from k3jax.data.tokens import TokenArrays


def describe(corpus: Corpus, batches: TrainBatches, rows: int) -> dict[str, Any]:
    """The report as JSON values.

    Args:
      corpus: the text.
      batches: the order of its rows.
      rows: that the whole run takes.

    Returns:
      rows; vocabulary; notes; sources, a list in order. Each source has name, location, train and
      validation (documents, bytes, tokens, bytes_per_token), near_duplicates dropped,
      longest_document (name, tokens), share_of_rows and epochs in this run, ends (the row from
      which it gives none, or null), groups, and groups_on_both_sides (0, counted).
    """
    counts = batches.mixture.counts(rows)
    ends = dict(batches.mixture.ends)
    sources = []
    for index, portion in enumerate(corpus.portions):
        end = ends.get(index)
        sources.append(
            {
                "name": portion.source.name or portion.source.location,
                "location": portion.source.location,
                "train": _sizes(corpus.train, corpus.train_tokens, portion.train),
                "validation": _sizes(
                    corpus.validation, corpus.validation_tokens, portion.validation
                ),
                "near_duplicates": portion.duplicates,
                "longest_document": _longest(corpus, portion),
                "share_of_rows": counts[index] / rows,
                "epochs": counts[index] / batches.rows_of(index),
                "ends": end if end is not None and end < rows else None,
                **_groups(corpus, portion),
            }
        )
    return {
        "rows": rows,
        "vocabulary": corpus.tokenizer.vocab_size,
        "notes": corpus.notes,
        "sources": sources,
    }


def format_report(report: dict[str, Any], batch_size: int) -> str:
    """A few lines for each source, what ends before the run does, and the notes."""
    lines = []
    for source in report["sources"]:
        longest = source["longest_document"]
        lines += [
            f"{source['name']}: train {_line(source['train'])}; "
            f"{source['share_of_rows']:.1%} of the rows, {source['epochs']:.2f} epochs",
            f"{source['name']}: validation {_line(source['validation'])}",
            f"{source['name']}: longest document {longest['name']}, {longest['tokens']:,} tokens",
        ]
        if source["groups"]:
            lines.append(
                f"{source['name']}: {source['groups']:,} groups, "
                f"{source['groups_on_both_sides']} on both sides of the split"
            )
        if source["near_duplicates"] and len(report["sources"]) > 1:
            lines.append(f"{source['name']}: {source['near_duplicates']:,} near-duplicates dropped")
        if source["ends"] is not None:
            lines.append(
                f"{source['name']}: has given its epochs after row {source['ends']:,} of all, in "
                f"step {-(-source['ends'] // batch_size)}; the other sources share its rows"
            )
    return "\n".join([*lines, f"vocabulary: {report['vocabulary']}", *report["notes"]])


def _sizes(documents: Sequence[Document], arrays: TokenArrays, which: range) -> dict[str, Any]:
    size = sum(documents[index].size for index in which)
    tokens = int(arrays.offsets[which.stop] - arrays.offsets[which.start])
    return {
        "documents": len(which),
        "bytes": size,
        "tokens": tokens,
        "bytes_per_token": size / max(tokens, 1),
    }


def _line(sizes: dict[str, Any]) -> str:
    return (
        f"{sizes['documents']:,} documents, {sizes['bytes']:,} bytes, {sizes['tokens']:,} tokens "
        f"({sizes['bytes_per_token']:.3f} bytes/token)"
    )


def _longest(corpus: Corpus, portion: Portion) -> dict[str, Any]:
    which = portion.train
    lengths = np.diff(corpus.train_tokens.offsets[which.start : which.stop + 1])
    index = int(np.argmax(lengths))
    return {"name": corpus.train[which[index]].name, "tokens": int(lengths[index])}


def _groups(corpus: Corpus, portion: Portion) -> dict[str, int]:
    sides = [
        {documents[index].group for index in which} - {""}
        for documents, which in (
            (corpus.train, portion.train),
            (corpus.validation, portion.validation),
        )
    ]
    return {"groups": len(sides[0] | sides[1]), "groups_on_both_sides": len(sides[0] & sides[1])}
