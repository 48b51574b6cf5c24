"""What an interval shown beside a number rests on: the noise floor, and the interval of the next run."""
