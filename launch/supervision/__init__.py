"""Watch a cell while it runs: progress, deadlines, GPU samples, the cause of a failure."""
