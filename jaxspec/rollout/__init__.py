"""Generating replies, with or without a draft, losslessly."""
