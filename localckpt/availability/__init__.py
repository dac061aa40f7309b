"""Availability of checkpoints: pure functions of an inventory of the pieces on each node."""
