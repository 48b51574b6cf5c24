"""What `python -m analysis predict` prints: forecasts, held-out cells, published ladders."""
