"""BAFFLE: clients run the model forward only and answer with differences of its loss."""
