"""The one error that readers of foreign text raise."""


class UnreadableInput(ValueError):
    """The text is not what its reader expects; the message says what was expected and where (file line, field)."""
