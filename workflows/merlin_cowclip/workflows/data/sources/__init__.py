"""Raw logs: CSV and parquet files to typed Arrow batches."""
