"""The processes of a cell: host agent, cell process and ranks, and the lines that a rank writes."""
