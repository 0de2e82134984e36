"""Configuration of a job: strategy, placement, parallel options, launch and run. Imports no torch."""
