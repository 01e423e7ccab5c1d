"""Training data: records, prompts and lessons, encoded, packed and ordered."""
