"""Coordinator: membership, views, calls, slot map, leases, over a journal."""
