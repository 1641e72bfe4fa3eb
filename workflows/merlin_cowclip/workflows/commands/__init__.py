"""The command `merlin-cowclip`: a module per group of its commands."""
