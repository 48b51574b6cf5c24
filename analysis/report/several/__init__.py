"""The report of several studies: machines, dates or versions beside each other, never merged."""
