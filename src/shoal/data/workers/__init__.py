"""Reader processes and threads that prepare batches ahead of training."""
