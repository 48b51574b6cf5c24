"""Studies of several machines, dates or versions beside each other: each keeps its own baselines, repeats and noise floor."""
