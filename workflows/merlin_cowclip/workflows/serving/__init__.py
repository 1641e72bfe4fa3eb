"""A finished run, as a Triton model repository."""
