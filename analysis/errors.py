"""The error that every reader of foreign text raises, and what an error says to a person."""


class UnreadableInput(ValueError):
    """Raised for text that its reader cannot use; the message says what is accepted, and where."""


def said(error: Exception) -> str:
    """Return what an error says; of one of the operating system the file first, no number."""
    is_numbered = isinstance(error, OSError) and str(error).startswith("[Errno")
    if isinstance(error, OSError) and is_numbered and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror[:1].lower()}{error.strerror[1:]}"
    return str(error)
