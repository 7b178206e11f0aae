"""Attacks on messages, each with a control on which it must succeed and a baseline that it must beat."""
