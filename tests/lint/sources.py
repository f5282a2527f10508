"""Which files of the project the lint checks look at."""

import os
import subprocess
from pathlib import Path

SKIPPED_FOLDERS = {"build", "quickstart-out", "__pycache__"}
C_SUFFIXES = {".h", ".hpp", ".c", ".cc", ".cu", ".cuh"}


def _from_git(root):
    """Tracked files and new ones that are not ignored; None where git cannot tell."""
    if not (root / ".git").exists():
        return None
    listing = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root, capture_output=True, text=True, check=False)
    if listing.returncode != 0:
        return None
    return [name for name in listing.stdout.split("\0") if name]


def _from_disk(root):
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if not f.startswith(".") and f not in SKIPPED_FOLDERS]
        names += [str((Path(folder) / file).relative_to(root)) for file in files]
    return names


def project_files(root, suffixes):
    """Sorted paths, relative to root, of the existing files with one of the suffixes."""
    root = Path(root)
    names = _from_git(root)
    if names is None:
        names = _from_disk(root)
    return sorted({Path(n) for n in names if Path(n).suffix in suffixes and (root / n).is_file()})


def report(problems, checked):
    """Prints problems, one a line; the exit code for a check over `checked` files."""
    for problem in problems:
        print(problem)
    if not checked:
        print("no file to check: wrong --root?")
        return 1
    print(f"{checked} files checked, {len(problems)} problems")
    return 1 if problems else 0
