"""Training with other libraries, each on local checkpoints."""
