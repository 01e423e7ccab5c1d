"""What the training loops learn on generated arithmetic."""
