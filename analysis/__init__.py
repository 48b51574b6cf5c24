"""What it means: topology, subsets, NCCL logs, validity and scaling. Needs neither a GPU nor torch."""
