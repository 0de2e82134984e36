"""Metrics, exact over all workers."""
