"""Run a command among the hosts of in_namespaces.sh, and note meanwhile who listens on which of them.

    tests/in_namespaces.sh 1gbit -- python tests/on_hosts.py FOLDER [--ssh] -- COMMAND…

FOLDER/listeners.jsonl gets a line for each listening socket, at each look: time, host (empty: outside them), address, program.
FOLDER/left.json names our processes that are left some seconds after the command's end.
With --ssh an sshd runs on each host, and FOLDER/ssh_config leads to it by the host's name, with keys made here.
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

EVERY_S = 0.25
LEFT_S = 10.0
PORT = 2222
USER = "ringside"


def hosts():
    """The names of the hosts, in the order of their addresses."""
    listed = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    ).stdout
    return sorted(line.split()[0] for line in listed.splitlines())


def address(host):
    return f"10.77.0.{hosts().index(host) + 1}"


def watch(file, ended):
    """Write down who listens until the end."""
    everywhere = {"": [], **{host: ["ip", "netns", "exec", host] for host in hosts()}}
    while not ended.wait(EVERY_S):
        for host, prefix in everywhere.items():
            said = subprocess.run(
                [*prefix, "ss", "-Hltnp"], capture_output=True, text=True, check=True
            ).stdout
            for line in said.splitlines():
                _, _, _, local, _, *process = line.split()
                program = re.search(r'\("([^"]*)",pid=(\d+)', " ".join(process))
                seen = {
                    "time": time.time(),
                    "host": host,
                    "address": local.rpartition(":")[0],
                    "port": local.rpartition(":")[2],
                }
                file.write(json.dumps(seen | {"program": program[1] if program else None}) + "\n")
        file.flush()


@contextlib.contextmanager
def sshd_everywhere(folder):
    """An sshd on each host, as a user who is not root: it needs a user namespace of its own, and a line in /etc/passwd."""
    for name in ("key", "host_key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True
        )
    users = Path("/etc/passwd").read_text() + f"{USER}:x:1000:1000::{folder}:/bin/sh\n"
    (folder / "passwd").write_text(users)
    subprocess.run(
        ["mount", "--bind", folder / "passwd", "/etc/passwd"], check=True
    )  # seen by nobody outside
    (folder / "known_hosts").write_text(
        "".join(f"[{address(host)}]:{PORT} {public(folder)}\n" for host in hosts())
    )
    everyone = f"""
Host *
  Port {PORT}
  User {USER}
  IdentityFile {folder}/key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile none
"""
    (folder / "ssh_config").write_text(
        "".join(f"Host {host}\n  HostName {address(host)}\n" for host in hosts()) + everyone
    )
    running = []
    try:
        for host in hosts():
            config = folder / f"sshd_{host}"
            config.write_text(
                f"ListenAddress {address(host)}\nPort {PORT}\nHostKey {folder}/host_key\nPidFile none\nUsePAM no\n"
                f"AuthorizedKeysFile {folder}/key.pub\nStrictModes no\nPasswordAuthentication no\n"
            )
            alone = [
                "ip",
                "netns",
                "exec",
                host,
                "unshare",
                "--user",
                "--map-user=1000",
                "--map-group=1000",
            ]
            running.append(subprocess.Popen([*alone, "/usr/sbin/sshd", "-D", "-q", "-f", config]))
        yield
    finally:
        for one in running:
            one.kill()


def public(folder):
    return " ".join((folder / "host_key.pub").read_text().split()[:2])


def left():
    """The commands of our processes that are left, LEFT_S after the command's end; looked for once if there is none."""
    deadline = time.monotonic() + LEFT_S
    while True:
        every = [one.info["cmdline"] or [] for one in psutil.process_iter(["cmdline"])]
        found = [
            " ".join(words)
            for words in every
            if any(word.startswith("benchmarks.") for word in words)
        ]
        if not found or time.monotonic() > deadline:
            return found
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
