"""What trains: batches, the configuration, the run and its evaluation."""
