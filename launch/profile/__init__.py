"""Run the profiled pass of a cell, and find Nsight Systems."""
