"""Outputs of NVIDIA's own tools: nccl-tests and p2pBandwidthLatencyTest, and Ringside's records in their form."""
