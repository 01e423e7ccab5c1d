"""RFT's profiles next to plain training."""
