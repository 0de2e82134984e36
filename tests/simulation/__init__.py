"""A cluster in one process: seeded virtual time, the real deciding parts, and everything that can go wrong."""
