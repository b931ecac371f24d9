"""Ends of CloverInfer in other programs: what they load, and what it needs of the rooms below."""
