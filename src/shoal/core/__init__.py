"""The ground floor: errors, the job a process belongs to, seeds. Imports nothing else of shoal, and no torch."""
