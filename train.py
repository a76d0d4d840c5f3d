"""Train a recipe: `torchrun --nproc-per-node N train.py RECIPE.toml [section.key=value ...]`."""

import sys

from meshtron.cli import train_main

if __name__ == "__main__":
    sys.exit(train_main())
