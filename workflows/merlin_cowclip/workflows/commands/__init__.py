# SPDX-License-Identifier: Apache-2.0
"""The command `merlin-cowclip`: a module per group of its commands."""
