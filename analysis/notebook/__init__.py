"""A study in a notebook: typed records, tables of pandas, figures of matplotlib. Begin with `analysis.open_study`."""
