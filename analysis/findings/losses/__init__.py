"""Parts of a loss: those that control cells, clocks and the moments of a step tell."""
