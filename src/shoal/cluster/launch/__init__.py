"""Launching a job: what to run, where, and whether the machine can."""
