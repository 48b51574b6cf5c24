"""Draw a step of a trace: as SVG, and that SVG as PDF."""
