# SPDX-License-Identifier: Apache-2.0
"""A finished run, as a Triton model repository."""
