"""Text, tokens, packed rows and their order. numpy, grain and tokenizers only; no jax arrays."""
