"""``python -m cli``, the same as ``millrace``."""

import sys

from cli.main import main

sys.exit(main())
