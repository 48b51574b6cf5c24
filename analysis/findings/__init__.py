"""What the records of a study say together: rates, efficiency, comparisons, worth of links."""
