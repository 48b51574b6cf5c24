"""MXNet's kvstore=dist_sync_device: parameter servers of their own processes, on GPUs; every update waits for all workers."""

import functools

from trainers.kvstore.push_pull import Mailboxes

STRATEGY = functools.partial(Mailboxes, synchronous=True, threads=1)
