"""Between text and the ids that a generator reads and writes."""

from collections.abc import Iterable, Iterator

import numpy as np

from k3jax.data.tokenizer import StreamDecoder, Tokenizer


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Ids of the beginning of a document: <|bos|> and the prompt, which may be empty.

    Raises:
      ValueError: the prompt holds a lone surrogate.
    """
    return [tokenizer.bos_id, *tokenizer.encode(prompt).tolist()]


def text_pieces(tokenizer: Tokenizer, tokens: Iterable[np.ndarray]) -> Iterator[str]:
    """Yields the text of row 0 as it becomes certain, up to the end of the document (<|eos|>).

    Args:
      tokenizer: Of the model.
      tokens: Arrays [B], from `Generator.stream`.
    """
    decoder = StreamDecoder(tokenizer)
    for token in tokens:
        if token[0] == tokenizer.eos_id:
            break
        piece = decoder.push([token[0]])
        if piece:
            yield piece
    rest = decoder.flush()
    if rest:
        yield rest
