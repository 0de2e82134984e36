"""Callbacks. Users import them from `shoal.callbacks`."""
