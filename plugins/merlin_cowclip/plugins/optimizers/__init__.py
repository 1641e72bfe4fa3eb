# SPDX-License-Identifier: Apache-2.0
"""CowClipAdam, and CowClipOptimizer for whole models."""
