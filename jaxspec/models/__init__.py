"""Policies: configuration, blocks and the pure forward pass."""
