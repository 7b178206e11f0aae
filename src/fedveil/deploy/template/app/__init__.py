"""A federation: its recipe, where records come from, and the two apps that Flower starts."""
