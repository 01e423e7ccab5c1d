"""Training data: records, prompts and solved questions, encoded, packed and ordered."""
