"""The loop of a software agent, by commands alone: read the inbox, hold the file, work, ack."""

import json
import os
import subprocess
import sys

WAIT = sys.argv[1] if len(sys.argv) > 1 else "55s"
os.environ.setdefault("TRUNKLINE_URL", "file:.bus")
os.environ.setdefault("TRUNKLINE_ACTOR", f"agent-{os.getpid()}")


def trunkline(*words: str, stdin: str = "") -> tuple[int, str]:
    done = subprocess.run(["trunkline", *words], input=stdin, stdout=subprocess.PIPE, text=True)
    return done.returncode, done.stdout


while True:
    # The most important events first, in no more characters than an agent wants to read.
    code, text = trunkline(*f"inbox edits --group agents --wait {WAIT} --budget 2000".split())
    if code:
        sys.exit(0 if code == 3 else code)  # 3: nothing came
    for event in (row for row in map(json.loads, text.splitlines()) if "handle" in row):
        path, line = event["payload"]["file"], event["payload"]["text"] + "\n"
        # The claim is held while the command runs. An agent has a better command than tee.
        code, _ = trunkline("claim", path, "--wait", "1m", "--", "tee", "-a", path, stdin=line)
        verdict = "nack" if code else "ack"  # what fails comes again, and at last is a dead letter
        trunkline(verdict, "-q", event["handle"])
        print(verdict, path, flush=True)
