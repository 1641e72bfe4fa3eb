"""Ranks of Horovod: collectives, sharded tables, start and callbacks."""
