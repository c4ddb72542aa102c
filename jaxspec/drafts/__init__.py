"""Draft models behind one protocol."""
