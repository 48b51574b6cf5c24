#!/usr/bin/env bash
# Run a command beside hosts that are network namespaces of this machine, each on its own wire. Needs no root.
#
#     tests/in_namespaces.sh [-n HOSTS] [-d DELAY] RATE -- COMMAND…        tests/in_namespaces.sh 1gbit -- python launch.py …
#
# The hosts a, b, c, … (2; at most 8) have the addresses 10.77.0.1, 10.77.0.2, … on eth0. Each wire carries RATE (as tc writes it:
# 1gbit, 200mbit) in each direction to one switch, and takes DELAY (5ms; none) from one host to another: by the kernel's netem,
# else by delayed_wire.py, which carries some Gbit/s. COMMAND runs outside the hosts, at the switch (10.77.0.254), and reaches
# into one by `ip netns exec a PROGRAM`. `ip link set port-a down` cuts the wire of a.
# The exit status is COMMAND's; 2 is a wrong call, 125 a machine that forbids it. When COMMAND ends, everything that it started
# ends too, and nothing is left. Hosts share processes, files and /dev/shm with each other.
set -euo pipefail

number=2
delay=0ms
usage() { echo "usage: tests/in_namespaces.sh [-n HOSTS] [-d DELAY] RATE -- COMMAND…" >&2; exit 2; }
while getopts n:d: option; do
  case $option in n) number=$OPTARG ;; d) delay=$OPTARG ;; *) usage ;; esac
done
shift $((OPTIND - 1))
[[ $# -ge 3 && $2 == -- && $number =~ ^[1-8]$ ]] || usage

if [[ -z ${IN_NAMESPACES:-} ]]; then
  # Namespaces of users, networks, mounts and processes. What is left when the first process in them ends is killed by the kernel.
  IN_NAMESPACES=1 exec unshare --map-root-user --net --mount --pid --fork --kill-child --mount-proc \
    -- "$0" -n "$number" -d "$delay" "$@"
fi
unset IN_NAMESPACES
here=$(cd "$(dirname "$0")" && pwd)
rate=$1
shift 2

has_netem() { tc qdisc add dev lo root netem delay 1ms 2> /dev/null && tc qdisc del dev lo root; }

wire() {  # HOST ADDRESS
  ip netns add "$1"
  if [[ $delayed_by == wire ]]; then
    "${RINGSIDE_PYTHON:-python3}" "$here/delayed_wire.py" "$1" "$delay" &
    until ip -n "$1" link show eth0 > /dev/null 2>&1; do
      kill -0 "$!"  # it has said why it ended: /dev/net/tun, a DELAY that is not in ms
      sleep 0.05
    done
  else
    ip link add "port-$1" type veth peer name eth0 netns "$1"
  fi
  ip link set "port-$1" master switch up
  ip -n "$1" address add "$2/24" dev eth0
  ip -n "$1" link set eth0 up
  ip -n "$1" link set lo up
  # Shaped at both ends, so that neither what a host sends nor what it is sent is faster.
  tc qdisc add dev "port-$1" root tbf rate "$rate" burst 256kb latency 50ms
  tc -n "$1" qdisc add dev eth0 root handle 1: tbf rate "$rate" burst 256kb latency 50ms
  [[ $delayed_by != netem ]] || tc -n "$1" qdisc add dev eth0 parent 1:1 netem delay "$delay" limit 100000
}

build() {
  mount -t tmpfs none /run  # `ip netns` keeps its names there
  ip link set lo up
  ip link add switch type bridge
  ip address add 10.77.0.254/24 dev switch
  ip link set switch up
  delayed_by=none
  [[ $delay == 0ms ]] || delayed_by=wire
  [[ $delayed_by == none ]] || ! has_netem || delayed_by=netem
  names=(a b c d e f g h)
  for ((k = 0; k < number; k++)); do wire "${names[k]}" "10.77.0.$((k + 1))"; done
}

set +e
(set -e; build)
[[ $? -eq 0 ]] || exit 125  # not `build ||`, which would switch set -e off inside
# This shell stays, as the first process of its namespace: it takes over processes whose parent ended.
"$@"
exit $?
