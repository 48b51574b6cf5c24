"""What `python -m analysis predict` and `advise` print: forecasts, held-out cells, published ladders, advice."""
