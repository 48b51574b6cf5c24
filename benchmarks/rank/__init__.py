"""The processes of a cell: the agent, its ranks, and what a rank reports."""
