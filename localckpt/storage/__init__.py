"""Image to this node's disk or memory and back: no torch.distributed."""
