"""What a step does: statistics per field, and NaN checks."""
