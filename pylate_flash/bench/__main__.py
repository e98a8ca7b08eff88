"""``python -m pylate_flash.bench``: the same command as ``pylate-flash bench``."""

from __future__ import annotations

from pylate_flash.bench.cli import main

if __name__ == "__main__":
    main()
