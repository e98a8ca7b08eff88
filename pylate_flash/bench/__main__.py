"""``python -m pylate_flash.bench``: the same command as ``pylate-flash bench``."""

from __future__ import annotations

from pylate_flash.bench.cli import main
from pylate_flash.cli.common import print_any_text

if __name__ == "__main__":
    print_any_text()
    main()
