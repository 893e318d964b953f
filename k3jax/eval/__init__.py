"""Judging a checkpoint: perplexity, needle retrieval, lm-eval tasks, logits."""
