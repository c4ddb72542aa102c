"""Reading and writing weights, tokenizers and drafts."""
