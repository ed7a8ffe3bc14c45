"""Build of the documentation site into ``build/site``.

    python -m tools.site

The build needs no network. It fails for a link to a page or heading that does not exist.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.site.build import build

_ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Build the site and return the exit code of the generator."""
    parser = argparse.ArgumentParser(prog="python -m tools.site", description=__doc__)
    parser.add_argument("--folder", type=Path, default=_ROOT / "build", help="default: build")
    folder = parser.parse_args().folder
    code = build(_ROOT, folder)
    if code == 0:
        print(f"Open {folder / 'site' / 'index.html'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
