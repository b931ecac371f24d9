"""Other engines' ends of CloverInfer: what they load, and what it needs of the rooms below."""
