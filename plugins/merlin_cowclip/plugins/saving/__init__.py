# SPDX-License-Identifier: Apache-2.0
"""Models and optimizer state on disk."""
