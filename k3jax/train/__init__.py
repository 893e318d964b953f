"""Training: state, step, checkpoints and the loop around them."""
