"""What a client checks of its own memory before it masks."""

from __future__ import annotations

from fedveil.core.stack import ClientStack


def check_memory(stack: ClientStack) -> None:
    """What a client remembers must say what of it is the server's, or that would not be bound into the masks."""
    for record in (record for memory in stack.memory for record in memory.values()):
        if record.common is None:
            raise TypeError(
                f"{type(record).__name__}, which clients remember, does not say which of its fields hold what the "
                "server supplied; for secure sums set `common` to their names, or to () if there are none"
            )
