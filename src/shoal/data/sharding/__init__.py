"""Sharding: which worker computes which part of a global batch."""
