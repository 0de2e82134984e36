"""The ground floor: errors, the job a process belongs to, seeds, how kernels are compiled. Imports nothing else of shoal, and no torch."""
