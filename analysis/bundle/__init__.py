"""One archive of a study that another person can open, check and make the report of again, without GPUs."""
