"""Several ranks of Horovod, as processes of their own; skipped where it is not installed."""
