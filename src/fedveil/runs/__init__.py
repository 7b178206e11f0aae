"""Recipes, run folders, and what a run costs."""
