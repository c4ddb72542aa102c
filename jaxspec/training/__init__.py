"""The training loop, checkpoints, metrics and the report."""
