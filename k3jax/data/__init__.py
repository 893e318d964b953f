"""Text, tokens, packed rows and their order. No jax arrays; numpy, grain and
tokenizers, and where a source asks for them pyarrow and fsspec.
"""
