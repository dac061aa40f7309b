"""Storage of images on this node's disk or in its memory, without torch.distributed."""
