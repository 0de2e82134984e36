"""Tensor parallelism: plan per layer, cut over DTensor, fixes for DTensor's operators."""
