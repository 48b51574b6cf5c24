"""Run a command among the hosts of in_namespaces.sh, and note who listens on which of them.

    tests/in_namespaces.sh 1gbit -- python tests/on_hosts.py FOLDER [--ssh] -- COMMAND…

FOLDER/listeners.jsonl gets a line for each listening socket, at each look: time, host (empty:
outside them), address, program. FOLDER/left.json names our processes that are left some seconds
after the command's end. With --ssh an sshd runs on each host, and FOLDER/ssh_config leads to it by
the host's name, with keys made here.
"""

import contextlib
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

EVERY_S = 0.4
LEFT_S = 10.0
PORT = 2222
USER = "ringside"
AS_USER = ("unshare", "--user", "--map-user=1000", "--map-group=1000")


def output(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def hosts():
    """The names of the hosts, in the order of their addresses."""
    return sorted(line.split()[0] for line in output("ip", "netns", "list").splitlines())


def address(host):
    return f"10.77.0.{hosts().index(host) + 1}"


def watch(file, ended):
    """Write down who listens until the end."""
    prefixes = {"": (), **{host: ("ip", "netns", "exec", host) for host in hosts()}}
    while not ended.wait(EVERY_S):
        for host, prefix in prefixes.items():
            for line in output(*prefix, "ss", "-Hltnp").splitlines():
                _, _, _, local, _, *process = line.split()
                program = re.search(r'\("([^"]*)",pid=(\d+)', " ".join(process))
                name, _, port = local.rpartition(":")
                seen = {"time": time.time(), "host": host, "address": name, "port": port}
                seen["program"] = program[1] if program else None
                file.write(json.dumps(seen) + "\n")
        file.flush()


@contextlib.contextmanager
def sshd_everywhere(folder):
    """An sshd on each host, as a user who is not root.

    It needs a user namespace of its own, and a line in /etc/passwd.
    """
    for name in ("key", "host_key"):
        output("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name)
    users = Path("/etc/passwd").read_text() + f"{USER}:x:1000:1000::{folder}:/bin/sh\n"
    (folder / "passwd").write_text(users)
    output("mount", "--bind", folder / "passwd", "/etc/passwd")  # seen by nobody outside
    public = " ".join((folder / "host_key.pub").read_text().split()[:2])
    known = [f"[{address(host)}]:{PORT} {public}\n" for host in hosts()]
    (folder / "known_hosts").write_text("".join(known))
    config = [f"Host {host}\n  HostName {address(host)}\n" for host in hosts()]
    config.append(
        f"Host *\n  Port {PORT}\n  User {USER}\n  IdentityFile {folder}/key\n"
        f"  IdentitiesOnly yes\n  UserKnownHostsFile {folder}/known_hosts\n"
        "  GlobalKnownHostsFile none\n"
    )
    (folder / "ssh_config").write_text("".join(config))
    running = []
    try:
        for host in hosts():
            config = folder / f"sshd_{host}"
            config.write_text(
                f"ListenAddress {address(host)}\nPort {PORT}\nHostKey {folder}/host_key\n"
                f"PidFile none\nUsePAM no\nAuthorizedKeysFile {folder}/key.pub\n"
                "StrictModes no\nPasswordAuthentication no\n"
            )
            sshd = ["/usr/sbin/sshd", "-D", "-q", "-f", config]
            running.append(subprocess.Popen(["ip", "netns", "exec", host, *AS_USER, *sshd]))
        yield
    finally:
        for process in running:
            process.kill()


def left():
    """The commands of our processes that are left, LEFT_S after the command's end.

    Looked for once if there is none.
    """
    deadline = time.monotonic() + LEFT_S
    while True:
        commands = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if any(word.startswith("benchmarks.") for word in words):
                commands.append(" ".join(words))
        if not commands or time.monotonic() > deadline:
            return commands
        time.sleep(0.1)


def main(folder, *arguments):
    mark = arguments.index("--")
    folder, ended = Path(folder), threading.Event()
    with (folder / "listeners.jsonl").open("w") as file:
        watching = threading.Thread(target=watch, args=(file, ended))
        with sshd_everywhere(folder) if "--ssh" in arguments[:mark] else contextlib.nullcontext():
            watching.start()
            status = subprocess.run(arguments[mark + 1 :], check=False).returncode
            ended.set()
            watching.join()
            (folder / "left.json").write_text(json.dumps(left()))
            return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
