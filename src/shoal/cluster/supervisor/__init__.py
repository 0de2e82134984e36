"""Supervisor: starts, watches and replaces the processes of a job on one host."""
