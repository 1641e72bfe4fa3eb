# SPDX-License-Identifier: Apache-2.0
"""Ranks of Horovod: collectives, sharded tables, start and callbacks."""
