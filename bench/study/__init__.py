"""A study of sparse training on a pretrained model, on generated questions whose answers can be verified."""
