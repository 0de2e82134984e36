"""What processes say to each other: messages, their bytes, and the sockets they travel on. Imports no torch."""
