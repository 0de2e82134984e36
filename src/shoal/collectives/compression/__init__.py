"""Gradient compressors, one file each; the registry is `shoal.config.choices.COMPRESSORS`."""
