"""Where data is: files that every host sees, that one host serves, or that each host has some of."""
