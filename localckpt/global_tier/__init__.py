"""Checkpoints on shared storage, in the format of torch.distributed.checkpoint."""
