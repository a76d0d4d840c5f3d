"""Train a recipe: `torchrun --nproc-per-node N train.py RECIPE.toml [section.key=value ...]`."""

from meshtron.cli import train_main

if __name__ == "__main__":
    train_main()
