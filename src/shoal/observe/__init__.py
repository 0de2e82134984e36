"""Readers of run directories: reports, timelines, the dashboard, drawings of models."""
