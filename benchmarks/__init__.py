"""One clock, the benchmarks, and the record of a cell. METHOD.md defines every number."""
