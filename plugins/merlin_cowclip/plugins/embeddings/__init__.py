# SPDX-License-Identifier: Apache-2.0
"""Embedding tables of a model: what they are, their rows, and how often ids occur."""
