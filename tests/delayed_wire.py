"""Join a host of in_namespaces.sh to its switch by a wire that takes a while, for a kernel without netem.

`delayed_wire.py HOST DELAY` makes the devices port-HOST here and eth0 in the network namespace HOST, and hands frames on
between them until it is killed: those from the host after DELAY (0.5ms), those to it at once. Frames are large (MTU): those
of a real wire, of 1,500 bytes, would be too many for one process.
"""

import contextlib
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
MTU = 65000


def tap(name):
    """Make a device and return the file whose frames it sends and receives."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
    subprocess.run(["ip", "link", "set", name, "mtu", str(MTU)], check=True)
    return device


def frames(device):
    """Yield the frames that wait in a device."""
    while True:
        try:
            yield os.read(device, 2 * MTU)
        except BlockingIOError:
            return


def hand_on(device, frame):
    """Write a frame; one that the device cannot take is lost, as on any wire."""
    with contextlib.suppress(OSError):
        os.write(device, frame)


def main(host, delay):
    delay_s = float(delay.removesuffix("ms")) / 1e3
    port, near = tap(f"port-{host}"), tap("delayed")
    subprocess.run(["ip", "link", "set", "delayed", "netns", host, "name", "eth0"], check=True)
    waiting = deque()
    while True:
        left_s = waiting[0][0] - time.monotonic() if waiting else None
        if left_s is None or left_s > 0:
            select.select([near, port], [], [], left_s)
        for frame in frames(near):
            waiting.append((time.monotonic() + delay_s, frame))
        for frame in frames(port):
            hand_on(near, frame)
        while waiting and waiting[0][0] <= time.monotonic():
            hand_on(port, waiting.popleft()[1])


main(*sys.argv[1:])
