"""Matrices of p2pBandwidthLatencyTest and of benchmark=p2p."""
