"""`shoal.nn`: layers of shoal's own."""

from shoal.embedding import HashEmbedding

__all__ = ["HashEmbedding"]
