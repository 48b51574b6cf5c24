"""The error that every reader of foreign text raises, and what an error says to a person."""


class UnreadableInput(ValueError):
    """Raised for text that its reader cannot use; the message says what is accepted and where (line, field)."""


def said(error: Exception) -> str:
    """Return what an error says; of one of the operating system the file first, without the number."""
    if (
        isinstance(error, OSError)
        and error.filename
        and error.strerror
        and str(error).startswith("[Errno")
    ):
        return f"{error.filename}: {error.strerror[:1].lower()}{error.strerror[1:]}"
    return str(error)
