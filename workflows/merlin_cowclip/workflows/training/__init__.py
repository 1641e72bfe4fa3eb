# SPDX-License-Identifier: Apache-2.0
"""What trains: batches, the configuration, the run and its evaluation."""
