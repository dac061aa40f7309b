"""How a save runs behind training; knows nothing of checkpoints."""
