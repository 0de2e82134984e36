"""Checkpoints: format, storage, snapshots, and what of a Trainer is saved."""
