"""Two hosts that look for a meeting address, for test_preflight: run inside `unshare -Urnm`, it prints what it found as JSON.

The hosts are network namespaces a and b, which one pair of interfaces joins. Another interface of a leads to c alone.
"""

import json
import select
import subprocess
import sys
import time

from benchmarks.agent.network import ProbeListeners, try_connect
from launch.engines.rendezvous import candidates, choose
from launch.machine.fleet import Host

NAMESPACES = """
set -e
mount -t tmpfs none /run; mkdir /run/netns
for one in a b c; do ip netns add $one; ip -n $one link set lo up; done
ip link add va netns a type veth peer name vb netns b
ip link add other netns a type veth peer name vc netns c
ip -n a addr add 10.9.0.1/24 dev va; ip -n b addr add 10.9.0.2/24 dev vb
ip -n a addr add 10.8.0.1/24 dev other; ip -n c addr add 10.8.0.2/24 dev vc
for one in "a va" "b vb" "a other" "c vc"; do ip -n ${one% *} link set ${one#* } up; done
ip -n b route add blackhole 10.8.0.0/24
"""


def on(host, *words):
    """Start a Python process on a host."""
    command = ["ip", "netns", "exec", host, sys.executable, *words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def listen(addresses):
    """Listen until the input ends, as an agent does from its loop."""
    listening, until = ProbeListeners(addresses, "word"), time.monotonic() + 30
    print(json.dumps(listening.ports), flush=True)
    while (
        sys.stdin not in select.select([sys.stdin, *listening.sockets], [], [], 1)[0]
        and time.monotonic() < until
    ):
        listening.answer()


def main():
    """Print [candidates, what b reached, the address, the interfaces, the listeners of a]."""
    subprocess.run(["bash", "-c", NAMESPACES], check=True)
    told = {name: on(name, "-m", "launch.machine.facts", "cpu").communicate()[0] for name in "ab"}
    first, other = (Host.described(name, text) for name, text in told.items())
    wanted = candidates(first, [other], None, False)
    listener = on("a", __file__, "listen", json.dumps(wanted))
    ports = listener.stdout.readline().decode()
    reached = json.loads(on("b", __file__, "reach", ports).communicate()[0])
    sockets = subprocess.run(
        ["ip", "netns", "exec", "a", "ss", "-Hltn"], capture_output=True, text=True, check=True
    )
    listener.communicate()
    found = choose(first, wanted, {}, {"b": reached})
    places = [line.split()[3].rpartition(":")[0] for line in sockets.stdout.splitlines()]
    print(json.dumps([wanted, reached, found.address, dict(found.interfaces), places]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["listen"]:
        listen(json.loads(sys.argv[2]))
    elif sys.argv[1:2] == ["reach"]:
        print(json.dumps(try_connect(json.loads(sys.argv[2]), "word", 1.0)))
    else:
        main()
