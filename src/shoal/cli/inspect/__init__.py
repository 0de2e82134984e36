"""Verbs that read a run, or show a model, and change neither."""
