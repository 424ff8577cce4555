"""Runs mypy over the package as it is installed: passes/ and kernels/ lie at the top of the repository, and
are packages of `rannc_backend`.

In: the repository, and mypy's further arguments. Out: mypy's findings, with the files' own paths, and its
exit code. The tree is one of links in mypy's cache folder, so that the next run knows what has not changed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".mypy_cache"
OUTSIDE = ("passes", "kernels")


def lay_out(folder: Path) -> None:
    """Links to the three packages, as an installation has them."""
    package = folder / "rannc_backend"
    package.mkdir(parents=True, exist_ok=True)
    wanted = {path.name: path for path in (ROOT / "rannc_backend").iterdir() if path.name != "__pycache__"}
    wanted |= {name: ROOT / name for name in OUTSIDE}
    for link in package.iterdir():
        if link.name not in wanted:
            link.unlink()
    for name, target in wanted.items():
        if not (package / name).exists():
            (package / name).unlink(missing_ok=True)
            (package / name).symlink_to(os.path.relpath(target, package))


def main(arguments: list[str]) -> int:
    """Returns mypy's exit code."""
    folder = CACHE / "installed"
    lay_out(folder)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    result = subprocess.run(
        [*command, "--cache-dir", str(CACHE), *arguments, "-p", "rannc_backend"],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
    )
    text = result.stdout
    for name in OUTSIDE:
        text = text.replace(f"rannc_backend/{name}/", f"{name}/")
    sys.stdout.write(text)
    return result.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
