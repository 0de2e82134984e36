"""`shoal bench`: benchmarks of this installation by name."""
