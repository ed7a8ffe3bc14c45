"""Quick import of torch in an engine's process; deferred modules load when they are needed."""

from __future__ import annotations

import json
import subprocess
import sys

_SCRIPT = """
import gc, json, sys
from millrace.engine.torch_start import import_torch

import_torch()
import torch

missing = "torch._refs" not in sys.modules
num_tracked = len(gc.get_objects())
import_torch()
product = torch.ones(2, 3) @ torch.ones(3, 2)
from torch._decomp.decompositions import max_pool2d_with_indices_backward
from torch._meta_registrations import pooling_output_shape

pairs = torch.empty(2, 6, device="meta")
print(json.dumps({
    "missing": missing,
    "collects": gc.isenabled(),
    "looked through": num_tracked > 10_000,
    "product": product.tolist(),
    "pooled": pooling_output_shape(8, 2, 0, 2, 1, False),
    "same": torch._meta_registrations is sys.modules["torch._meta_registrations"],
    "meta": list(torch.cdist(pairs, pairs).shape),
}))
"""


def test_deferred_modules_load_when_compilers_need_them() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "missing": True,
        "collects": True,
        "looked through": False,
        "product": [[3.0, 3.0], [3.0, 3.0]],
        "pooled": 4,
        "same": True,
        "meta": [2, 2],
    }


def test_ranks_choose_when_to_import_it() -> None:
    """A rank imports torch once its modules and its environment are known."""
    module = "millrace.engine.parallel.member"
    script = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
