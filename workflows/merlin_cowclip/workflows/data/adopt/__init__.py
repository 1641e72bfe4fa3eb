# SPDX-License-Identifier: Apache-2.0
"""Take over a saved NVTabular workflow and the parquet that it wrote; encode raw rows with it."""
