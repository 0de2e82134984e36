"""Training loops of the script's own: `shoal.setup`, its checkpoints, progress, leases, and how a replacement enters them."""
