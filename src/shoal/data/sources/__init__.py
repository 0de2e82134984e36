"""Sources: samples by index, from memory, from functions, or from other sources."""
