"""Parts of tensors between ranks, sent as they are read, and taken where they belong."""
