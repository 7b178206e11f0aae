"""Federated learning methods."""
