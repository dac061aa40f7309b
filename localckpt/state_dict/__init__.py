"""Conversion of a trainer's state to an image and back, without I/O and torch.distributed."""
