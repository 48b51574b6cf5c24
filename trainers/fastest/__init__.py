"""What `optimize=max` does beyond torch.compile."""
