"""Parts of a loss that other measurements tell: clocks, and the moments of a step."""
