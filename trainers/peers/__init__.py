"""What the ranks of a cell have with each other: groups of them, what they tell each other, what the wires between them allow."""
