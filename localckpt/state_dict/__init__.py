"""Trainer's objects to image and back: no I/O, no torch.distributed."""
