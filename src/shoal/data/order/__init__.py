"""Sample order: shuffles, splits, filters and repetitions as functions from position to index."""
