"""``python -m sagc_fast`` is ``sagc-fast``."""

from __future__ import annotations

import sys

from sagc_fast.cli import main

if __name__ == "__main__":
    sys.exit(main())
