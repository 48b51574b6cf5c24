"""MXNet's kvstore=dist_async: parameter servers of their own processes, in host memory; every push is applied when it arrives."""

import functools

from trainers.kvstore.mailboxes import Mailboxes

STRATEGY = functools.partial(Mailboxes, synchronous=False)
