"""Foundations of every process: transport, failpoints, seeds, compiled kernels, serialization."""
