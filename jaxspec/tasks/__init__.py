"""Prompts with verifiable answers."""
