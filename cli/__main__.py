"""``python -m millrace.cli``, the same as ``millrace``."""

import sys

from millrace.cli.main import main

sys.exit(main())
