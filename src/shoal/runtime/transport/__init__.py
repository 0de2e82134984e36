"""Transport between processes: messages, their bytes, sockets and shared memory. Imports no torch."""
