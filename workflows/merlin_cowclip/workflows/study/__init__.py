# SPDX-License-Identifier: Apache-2.0
"""What compares: values searched at a batch size itself, and lists of runs."""
