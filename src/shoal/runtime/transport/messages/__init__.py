"""Messages between processes, one class each, one file per pair of speakers."""
