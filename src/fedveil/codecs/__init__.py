"""How an update looks on the wire."""
