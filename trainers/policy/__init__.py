"""The trained model: loading, log-probabilities, reference model, value head, and its optimizer."""
