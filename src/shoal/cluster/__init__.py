"""Processes of a job: coordinator, supervisor, worker, hosts, launch, and the ledger of what they trained."""
