"""Parameter server process: slots, updates, replication."""
