"""Parts of the waterfall one by one: clocks, and the exposed communication beside its model."""
