"""Messages between processes, by who speaks: one class per sentence, and all that a decoder accepts."""

from shoal.runtime.transport.messages import (
    blocks,
    client_server,
    hosts,
    server_coordinator,
    supervisor,
    worker_coordinator,
)
from shoal.runtime.transport.messages.message import Message

MESSAGES: tuple[type[Message], ...] = tuple(
    kind
    for module in (worker_coordinator, supervisor, server_coordinator, client_server, blocks, hosts)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Message) and kind.__module__ == module.__name__
)
"""Every message of the modules above; a new one is one class in one of them."""
