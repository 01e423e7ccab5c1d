"""The namespaces of the ops: `torch.ops.sparse_opt` has the public ones, `torch.ops.sparse_opt_native` the extension's.

A build for Hugging Face's `kernels` has other names in this file, so that several builds can be loaded in one process.
"""

PUBLIC = "sparse_opt"
NATIVE = "sparse_opt_native"
