"""What communication costs a step, and the values of a record that need other records."""
