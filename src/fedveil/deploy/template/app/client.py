"""A client's app. Flower starts it for every question; which client it is, is in the node's configuration."""

from pathlib import Path

from fedveil.deploy.party import client_app

from .data import load

app = client_app(Path(__file__).with_name("recipe.toml"), load)
