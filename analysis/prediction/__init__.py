"""Forecasts of cells: what a step should take, with an interval and beside a null model."""
