"""How weights reach the clients, and how their codes are averaged without decoding each."""
