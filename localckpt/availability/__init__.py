"""Availability of checkpoints: pure functions of who holds which piece of which checkpoint."""
