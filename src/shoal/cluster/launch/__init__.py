"""Launching a job: its configuration, its placement, and checks of the machine."""
