"""Host memory of a process that trains on CPU: what a step frees stays with the process."""

import ctypes

# Parameters of glibc's mallopt(3) and the largest value that it takes for the first one.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
LARGEST_MMAP_THRESHOLD = 32 << 20
NEVER = -1


def keep_freed_memory() -> None:
    """Have the C library keep memory that is freed, as torch's allocator does on a GPU. Without glibc it does nothing.

    By default freed tensors go back to Linux in some steps and not in others, as glibc adapts its limits to what it has seen.
    A step that gets its memory anew meets a page fault for every 4 KiB: two windows of one cell would differ by that alone.
    Single tensors above 32 MiB still come from Linux each time (mallopt(3), M_MMAP_THRESHOLD).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
        mallopt(TRIM_THRESHOLD, NEVER)
