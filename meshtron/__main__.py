"""``python -m meshtron`` is the ``meshtron`` program."""

from meshtron.cli import main

if __name__ == "__main__":
    main()
