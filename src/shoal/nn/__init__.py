"""Embedding layers whose rows live somewhere else, and the rows themselves as one process keeps them."""
