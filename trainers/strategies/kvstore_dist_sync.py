"""MXNet's kvstore=dist_sync: parameter servers of their own processes, in host memory; every update waits for all workers."""

import functools

from trainers.kvstore.push_pull import Mailboxes

STRATEGY = functools.partial(Mailboxes, synchronous=True)
