"""GPU kernels in Pallas: arrays in, arrays out.

No autodiff, no dispatch and no validation of user input happens here; `dormouse_jax` does all three.
"""
