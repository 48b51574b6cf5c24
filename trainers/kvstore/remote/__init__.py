"""A worker and a server on different hosts: what they would write into shared memory travels as messages.

messages  the connection of one worker and one server, and what they say to each other
servers   the servers on other hosts, as a worker sees them
workers   the workers on other hosts, as a server sees them
"""
