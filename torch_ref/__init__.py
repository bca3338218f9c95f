"""PyTorch references: a float64 oracle (`torch_ref.oracle`) and a chunked port (`torch_ref.kda`). Imports no JAX."""
