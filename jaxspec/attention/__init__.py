"""Attention of query rows over a trunk of keys and a private branch: oracle and tiled form."""
