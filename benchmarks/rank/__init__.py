"""The processes of a cell: the agent, its ranks, and the lines that a rank writes."""
