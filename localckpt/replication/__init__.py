"""Image to other nodes and back."""
