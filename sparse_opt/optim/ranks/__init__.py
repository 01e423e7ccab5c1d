"""Optimizers on several ranks: the process group, checks across ranks, and shards of FSDP2."""
