"""Engines: cluster managers that give a job its processes, one file each behind one protocol."""
