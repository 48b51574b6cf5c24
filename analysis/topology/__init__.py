"""What connects the GPUs of a machine: read, compared, drawn, and the subsets of them."""
