"""Benchmark of RFT's profiles against plain training."""
