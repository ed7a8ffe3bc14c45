"""Programs that tests need and that may be absent."""

from __future__ import annotations

import os
import shutil

from tests.support.repository import ROOT


def is_there(program: str) -> bool:
    """Return whether the program is in ``.engines/bin`` or on the PATH, where workers look.

    The tests of ``find_program`` hold the product's own search. Every run loads this file, so that
    it imports nothing of the product: a change of the workers would select all tests.
    """
    places = (str(ROOT / ".engines" / "bin"), os.environ.get("PATH", os.defpath))
    return shutil.which(program, path=os.pathsep.join(places)) is not None
