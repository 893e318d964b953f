"""A model that scores and continues text: what an evaluation harness asks for, without one.

Tokens follow lm-eval's conventions: blanks at the end of a context belong to the continuation; a
continuation's tokens are those of the joined text behind as many as the context alone has; every
text begins with <|bos|>, as in training.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from k3jax.data.prompt import encode_prompt
from k3jax.data.tokenizer import StreamDecoder, Tokenizer
from k3jax.eval.score import Pair, fill, score
from k3jax.models.kimi_k3.config import ModelConfig
from k3jax.models.kimi_k3.generate import Generator
from k3jax.models.kimi_k3.sampling import Sampling

DEFAULT_TOKENS = 256  # lm-eval's own default
_LENGTHS = ("max_gen_toks", "max_tokens", "max_new_tokens")


@dataclasses.dataclass(frozen=True)
class Generation:
    """How to continue a text.

    Attributes:
      until: The text ends before the first of these.
      tokens: At most so many.
      sampling: How to choose.
    """

    until: tuple[str, ...]
    tokens: int
    sampling: Sampling


def read_generation(options: Mapping[str, Any]) -> Generation:
    """The settings of a `generate_until` request.

    Args:
      options: `until` (text or list), `max_gen_toks`, `do_sample`, `temperature`, `top_p`,
        `top_k`; greedy unless `do_sample` is true or, without it, `temperature` is positive.

    Raises:
      ValueError: an option is unknown or has no meaning.
    """
    left = dict(options)
    until = left.pop("until", None) or ()
    until = (until,) if isinstance(until, str) else tuple(text for text in until if text)
    counts = [left.pop(name) for name in _LENGTHS if name in left]
    sampled = left.pop("do_sample", None)
    temperature = float(left.pop("temperature", 1.0 if sampled else 0.0))
    filters = {name: kind(left.pop(name)) for name, kind in _FILTERS.items() if name in left}
    if left:
        raise ValueError(
            f"generation option {sorted(left)[0]!r} is unknown; there are until, do_sample, "
            f"temperature, top_p, top_k and {', '.join(_LENGTHS)}: take it out of the task"
        )
    if sampled is False:
        temperature = 0.0
    tokens = int(counts[0]) if counts else DEFAULT_TOKENS
    return Generation(until, tokens, Sampling(temperature, **filters))


_FILTERS = {"top_p": float, "top_k": int}


class TextModel:
    """One checkpoint. Results are in the order of the requests, whatever the batches."""

    def __init__(
        self,
        cfg: ModelConfig,
        variables: Any,
        tokenizer: Tokenizer,
        sequence_length: int,
        batch_size: int,
    ):
        """Compiles nothing yet.

        Args:
          cfg: The model.
          variables: {"params", "router"}.
          tokenizer: The one the model was trained with.
          sequence_length: Tokens in a row of `rolling`.
          batch_size: Rows that run together.
        """
        self._cfg, self._variables, self.tokenizer = cfg, variables, tokenizer
        self._length, self._batch = sequence_length, batch_size
        self._generator = Generator(cfg, tokenizer.vocab_size)

    def encode_pair(self, context: str, continuation: str) -> Pair:
        """Ids of a context, <|bos|> first, and of its continuation.

        Where merges swallow the whole continuation into the context's last token, both are
        encoded by themselves: the pair then still spells the text.

        Raises:
          ValueError: the continuation is empty, or a text has no UTF-8 form.
        """
        if not continuation:
            raise ValueError(
                f"the continuation of context {context[-40:]!r} is empty: there is nothing to "
                "score; correct the task's choices"
            )
        given = context.rstrip()
        continuation = context[len(given) :] + continuation
        before = encode_prompt(self.tokenizer, given)
        behind = encode_prompt(self.tokenizer, given + continuation)[len(before) :]
        return Pair(before, behind or self.tokenizer.encode(continuation).tolist())

    def log_likelihoods(self, requests: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """(Σ log p [nats], whether greedy decoding gives it) of each (context, continuation)."""
        pairs = [self.encode_pair(*request) for request in requests]
        return [tuple(found) for found in self._score(pairs)]

    def rolling(self, texts: Sequence[str]) -> list[float]:
        """Σ log p [nats] of each text, every token once, the end of the document not included.

        Rows are those of `perplexity.of_text` for a text by itself, so the two sums agree; only
        the first token of a row's continuation is without the context before.
        """
        pairs, owners = [], []
        for owner, text in enumerate(texts):
            ids = encode_prompt(self.tokenizer, text)
            for start in range(0, len(ids) - 1, self._length):
                piece = ids[start : start + self._length + 1]
                pairs.append(Pair(piece[:1], piece[1:]))
                owners.append(owner)
        sums = [0.0] * len(texts)
        for owner, found in zip(owners, self._score(pairs), strict=True):
            sums[owner] += found.log_probability
        return sums

    def continue_texts(self, requests: Sequence[tuple[str, Generation]]) -> list[str]:
        """Continues each text up to one of its stop texts, <|eos|> or the number of tokens."""
        answers: dict[int, str] = {}
        prompts = [encode_prompt(self.tokenizer, context) for context, _ in requests]
        for wanted in dict.fromkeys(generation for _, generation in requests):
            mine = [i for i, (_, generation) in enumerate(requests) if generation == wanted]
            mine.sort(key=lambda i: len(prompts[i]))
            for start in range(0, len(mine), fill(self._batch)):
                rows = mine[start : start + fill(self._batch)]
                texts = self._continue([prompts[i] for i in rows], wanted)
                answers |= dict(zip(rows, texts, strict=True))
        return [answers[index] for index in range(len(requests))]

    def _score(self, pairs: Sequence[Pair]):
        return score(self._cfg, self._variables, pairs, self._batch)

    def _continue(self, prompts: Sequence[list[int]], wanted: Generation) -> list[str]:
        """One batch; stops when every row has ended."""
        filled = [*prompts, *[prompts[-1]] * (fill(self._batch) - len(prompts))]
        rows = [_Row(self.tokenizer, wanted.until) for _ in prompts]
        stream = self._generator.stream(
            self._variables, filled, wanted.tokens, wanted.sampling, jax.random.key(0)
        )
        for tokens in stream:
            for row, token in zip(rows, tokens, strict=False):
                row.push(int(token))
            if all(row.ended for row in rows):
                break
        return [row.text() for row in rows]


class _Row:
    """The text of one row so far."""

    def __init__(self, tokenizer: Tokenizer, until: tuple[str, ...]):
        self._eos, self._decoder = tokenizer.eos_id, StreamDecoder(tokenizer)
        self._until, self._text, self.ended = until, "", False

    def push(self, token: int) -> None:
        if self.ended:
            return
        if token == self._eos:
            self._text += self._decoder.flush()
            self.ended = True
        else:
            self._text += self._decoder.push([token])
        self._cut()

    def text(self) -> str:
        if not self.ended:
            self._text += self._decoder.flush()
            self._cut()
        return self._text

    def _cut(self) -> None:
        places = [self._text.find(stop) for stop in self._until]
        found = [place for place in places if place >= 0]
        if found:
            self._text, self.ended = self._text[: min(found)], True
