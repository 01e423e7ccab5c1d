"""The table of kernels: every op and optimizer on a 3B model, next to its bandwidth bound, peers and targets."""
