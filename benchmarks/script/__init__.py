"""Any training script as a cell: its ranks, what is attached to them, and their numbers."""
