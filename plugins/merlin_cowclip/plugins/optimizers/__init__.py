"""CowClipAdam, and CowClipOptimizer for whole models."""
