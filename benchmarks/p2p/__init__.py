"""benchmark=p2p: copies between every two GPUs, as p2pBandwidthLatencyTest measures them."""
