"""Local SGD: workers step alone and synchronise every k steps (--sync-every, --outer)."""
