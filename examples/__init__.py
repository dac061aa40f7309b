"""Programs to read and to run: a loop of 30 lines, and a training that loses a node."""
