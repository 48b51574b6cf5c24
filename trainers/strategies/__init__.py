"""The strategies: how gradients become updated weights on all ranks, one file each."""
