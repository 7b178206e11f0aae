"""Recipes, run folders, and what a run costs."""

import fedveil.methods  # noqa: F401 - a recipe or a checkpoint may be of any method
