"""Have Hydra compose the requests of a sweep, quickly, and say in one sentence what is wrong with one."""
