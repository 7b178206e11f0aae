"""The server's half of a round, under the name by which this family knows it."""

from fedveil.server import Merge, Server, ServerState, Versions

__all__ = ["Merge", "Server", "ServerState", "Versions"]
