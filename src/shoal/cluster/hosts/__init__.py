"""Hosts of a job: joining, certificates, host agents, and how the supervisor sees them."""
