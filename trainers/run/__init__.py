"""One training run: outputs, checkpoints, metrics, progress and delta log."""
