"""Take over a saved NVTabular workflow and the parquet that it wrote; encode raw rows with it."""
