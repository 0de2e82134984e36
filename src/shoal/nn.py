"""`shoal.nn`: layers of shoal's own."""

from shoal.config.row_policy import RowPolicy
from shoal.embedding import HashEmbedding

__all__ = ["HashEmbedding", "RowPolicy"]
