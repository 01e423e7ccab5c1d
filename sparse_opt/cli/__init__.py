"""The command line: `sparse-opt`, or `python -m sparse_opt`."""
