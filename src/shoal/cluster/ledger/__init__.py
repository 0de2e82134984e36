"""Ledger: which worker trained which samples."""
