"""Training: state, loss, step, evaluation, checkpoints and the loop around them."""
