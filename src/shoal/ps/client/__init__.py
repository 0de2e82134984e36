"""Clients of the parameter server: pulls, pushes, steps, the key-value interface."""
