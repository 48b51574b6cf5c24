"""What a cell with CUDA graphs (`optimize=graph`, `compile_graph`) is checked for beside what every cell is."""
