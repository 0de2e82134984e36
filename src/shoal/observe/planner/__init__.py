"""Planner: measured script in, the strategy that suits it out."""
