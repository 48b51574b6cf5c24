"""Outputs of nccl-tests and p2pBandwidthLatencyTest, and Ringside's records in their form."""
