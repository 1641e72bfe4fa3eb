"""Embedding tables of a model: what they are, their rows, and how often ids occur."""
