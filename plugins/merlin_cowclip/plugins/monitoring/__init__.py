# SPDX-License-Identifier: Apache-2.0
"""What a step does: statistics per field, and NaN checks."""
