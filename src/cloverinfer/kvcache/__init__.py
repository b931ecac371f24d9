"""Block ids, prefixes and the layout of a pool; knows nothing of tensors."""
