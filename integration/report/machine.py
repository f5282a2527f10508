"""What a measurement was made on."""

import datetime
import os
import platform
import subprocess
from pathlib import Path


def _field(path, name):
    try:
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    except OSError:
        pass
    return "unknown"


def _distribution():
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "unknown")
    except OSError:
        return "unknown"


def commit(root):
    """The commit of a checkout, "+ changes" if it differs; "unknown" without git."""
    def git(*words):
        return subprocess.run(["git", "-c", "safe.directory=*", "-C", str(root), *words], capture_output=True,
                              text=True, check=True).stdout.strip()
    try:
        return git("rev-parse", "--short=12", "HEAD") + (" + changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def processor():
    return f"{_field('/proc/cpuinfo', 'model name')}, {len(os.sched_getaffinity(0))} cores usable"


def describe(root):
    """Label and value pairs."""
    memory = _field("/proc/meminfo", "MemTotal").split()[0]
    gib = f"{int(memory) / 2**20:.0f} GiB" if memory.isdigit() else "unknown"
    return [
        ("Processor", processor()),
        ("Memory", gib),
        ("System", f"{_distribution()}, {platform.system()} {platform.release()}"),
        ("Commit", commit(root)),
        ("Date", datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")),
    ]
