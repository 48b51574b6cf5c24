"""A study's report: sentences, tables and figures, as a page, Markdown, CSV, LaTeX and SVG."""
