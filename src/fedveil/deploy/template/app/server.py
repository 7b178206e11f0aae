"""The server's app. Flower starts it when a run begins; what it does is in recipe.toml."""

from pathlib import Path

from fedveil.deploy.party import server_app

from .data import load

app = server_app(Path(__file__).with_name("recipe.toml"), load)
