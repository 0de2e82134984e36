"""The peers that shoal is measured against: one runner each, run by the peer's own interpreter."""
