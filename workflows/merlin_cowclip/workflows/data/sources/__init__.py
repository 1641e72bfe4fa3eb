# SPDX-License-Identifier: Apache-2.0
"""Raw logs: CSV and parquet files to typed Arrow batches."""
