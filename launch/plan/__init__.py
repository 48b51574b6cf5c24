"""From requests to an ordered list of cells, and everything that is refused before a start."""
