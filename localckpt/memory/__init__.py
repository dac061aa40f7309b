"""Host memory: mappings, copies by several threads, copies from GPUs, and digests of blocks."""
