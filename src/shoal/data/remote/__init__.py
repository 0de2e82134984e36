"""Remote files: on every host, served by one host, or spread over the hosts."""
