"""A training step end to end, sparse next to dense and LoRA."""
