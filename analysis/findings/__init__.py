"""What the records of a study say together: rates, efficiency, comparisons, what a link is worth."""
