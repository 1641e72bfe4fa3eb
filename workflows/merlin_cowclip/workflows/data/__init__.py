"""What turns logs into data: ids, counts, parquet, and what describes them."""
