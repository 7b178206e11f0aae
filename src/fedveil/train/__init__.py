"""How a client trains, and how the server combines updates and takes a step."""
