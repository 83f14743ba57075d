"""A little engine for tests: it answers as podman or docker do, runs words on this machine, and can fail.

    stand_in.py FOLDER podman|docker WORDS...

`FOLDER/mode` says how: `works`, `hangs`, `refuses`, `garbage`, or SUBCOMMAND:MODE; `groups:refuses` runs
nothing in control groups. Each call is a line of JSON in `FOLDER/calls`.
"""

import json
import os
import sys
import time
from pathlib import Path

DIGEST = "ab" * 32
INFO = {
    "podman": {
        "host": {"security": {"rootless": False, "seccompProfilePath": "FOLDER/calls.json"}},
        "version": {"Version": "5.0.0"},
    },
    "docker": {"SecurityOptions": ["name=seccomp,profile=default"], "ServerVersion": "28.0.0"},
}
PROBED = "network 1\nreading 1\nwriting 1\nsignals 1\nprivileges 1\nmemory 1\nprocesses 1\n"


def main() -> None:
    folder, name, *words = Path(sys.argv[1]), *sys.argv[2:]
    with (folder / "calls").open("a") as file:
        file.write(json.dumps(words) + "\n")
    if fails((folder / "mode").read_text().strip(), words):
        return
    if words[0] == "info":
        print(json.dumps(INFO[name]).replace("FOLDER", str(folder)))
    elif words[:2] == ["image", "inspect"]:
        print(image(folder, words[-1]))
    elif words[:2] == ["container", "inspect"]:
        print("false 0")
    elif words[0] == "ps":
        print((folder / "containers").read_text())
    elif words[0] == "run":
        run(words, (folder / "probed").read_text())


def fails(mode: str, words: list[str]) -> bool:
    """Whether nothing more is to be said."""
    word, _, own = mode.rpartition(":")
    if word == "groups" and words[0] == "run" and any(one.startswith("--memory") for one in words):
        sys.exit("Error: no control groups")
    if word not in ("", words[0]):
        return False
    if own == "late":
        time.sleep(2)
        return False
    if own == "hangs":
        time.sleep(900)
    if own == "refuses":
        sys.exit(f"WARN[0000] something else\nError: {words[0]} is refused")
    if own == "garbage":
        sys.stdout.write("\x1b[31m{not json" * 1000)
    return own != "works"


def image(folder: Path, name: str) -> str:
    if name != "known:1":
        sys.exit("Error: no such image")
    config = json.loads((folder / "config").read_text())
    usual = json.dumps([{"Id": (folder / "digest").read_text(), "Config": config}])
    return (folder / "answer").read_text() or usual


def run(words: list[str], probed: str) -> None:
    """Its command, in the folder that it mounts as the home; or what the probe would have said."""
    place = words.index("/bin/sh")
    home = next(word for word in words if "target=/home/agent" in word).split("source=")[1].split(",")[0]
    os.chdir(home)
    begin, name, token, *command = words[place + 2 :]
    print("WARN[0000] a word of the engine's own", file=sys.stderr, flush=True)
    if "ipv6_route" in " ".join(command):
        Path("note").write_text("written")
        command = ["printf", "%s", probed]
    variables = {**os.environ, "PATH": os.defpath}
    os.execve("/bin/sh", ["/bin/sh", "-c", begin, name, token, *command], variables)


if __name__ == "__main__":
    main()
