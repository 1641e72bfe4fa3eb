"""What compares: values searched at a batch size itself, and lists of runs."""
