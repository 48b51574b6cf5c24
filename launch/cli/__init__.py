"""Read the command line, compose its requests with Hydra, answer --help, and explain what is wrong
in one sentence."""
