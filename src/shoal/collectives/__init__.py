"""Exchanges between workers: how bytes are added, gathered and laid out for it."""
