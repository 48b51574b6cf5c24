"""The parts of a step, each looked up in the calibration (analysis.prediction.forecast puts them together)."""
