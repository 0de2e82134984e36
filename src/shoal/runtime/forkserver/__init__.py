"""The fork server: a single-threaded process that forks children on command, reaps them and reports their deaths.

messages.py   commands and reports, and how descriptors travel with them
server.py     the loop in the forking process, and how a child begins and ends
client.py     the owner's handle, and a server that is a fork of its owner

Launched jobs fork workers, servers and the coordinator from a fresh process
that has imported torch (`cluster/supervisor/warm_parent.py`). Reader pools and
map-reduce fork from a copy of the training process, which holds the dataset.
"""
