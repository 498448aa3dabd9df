"""``python -m forge`` is ``quantforge``."""

from forge.cli.app import main

if __name__ == "__main__":
    main()
