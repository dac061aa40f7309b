"""Calls behind training, and their agreement among ranks; knows nothing of checkpoints."""
