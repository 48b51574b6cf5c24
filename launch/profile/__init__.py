"""The profiled pass beside the timed one, and Nsight Systems."""
