"""The first screen of a report: what was measured, the answer, how sure it is, why, and what to do next."""
