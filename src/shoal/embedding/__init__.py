"""Embedding layers whose rows live somewhere else, and the rows themselves as one process keeps them."""

from shoal.embedding.hash_embedding import HashEmbedding

__all__ = ["HashEmbedding"]
