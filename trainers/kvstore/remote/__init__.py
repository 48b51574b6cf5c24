"""A worker and a server on different hosts: what they would write into shared memory travels as messages.

messages  the connection of one worker and one server, and what they say to each other
servers   a server on another host, as a worker sees it
gpus      both where gradients and weights lie on GPUs: NCCL
workers   the workers on other hosts, as a server sees them
meeting   the servers on other hosts, which a worker meets
"""
