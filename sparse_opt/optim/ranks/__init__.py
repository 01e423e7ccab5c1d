"""Optimizers on several ranks: the process group, checks across ranks, lost ranks, and shards of FSDP2."""
