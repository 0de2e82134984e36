"""Fewer bytes for the sum of gradients, one file per way; what a sum loses is known, and most of it is kept for later."""
