"""Models and optimizer state on disk."""
