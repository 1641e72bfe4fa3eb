# SPDX-License-Identifier: Apache-2.0
"""Raw logs to prepared data: split, fit, encode, shuffle, write."""
