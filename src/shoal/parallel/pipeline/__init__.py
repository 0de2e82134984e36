"""Pipeline parallelism: trace, partition into stages, run them under torch's schedules."""
