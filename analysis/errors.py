"""The error that every reader of foreign text raises."""


class UnreadableInput(ValueError):
    """Raised for text that its reader cannot use; the message says what is accepted and where (line, field)."""
