"""A report's tables and figures as LaTeX for papers: floats to be \\input, and a document that shows them all."""
