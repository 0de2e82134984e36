"""Strategies over the parameter server: exact (ps), relaxed (ps:ssp, ps:async, ps:hybrid) and partial (ps:drop, ps:stale-ok)."""
