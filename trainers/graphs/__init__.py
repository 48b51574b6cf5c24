"""Training steps that are captured once as CUDA graphs, and replayed since: `optimize=graph` and `optimize=compile_graph`."""
