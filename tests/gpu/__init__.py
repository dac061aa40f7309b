"""Jobs with a GPU: what they save and load, over NCCL alone where there are several ranks."""
