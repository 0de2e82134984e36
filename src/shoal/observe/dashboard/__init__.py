"""Dashboard: a web server of its own over the files of run directories. Reads, never writes."""
