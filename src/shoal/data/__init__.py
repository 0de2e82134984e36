"""Datasets as functions of an index."""
