"""Figures behind every claim of speed: `make bench`, or `python -m benchmarks NAME`."""
