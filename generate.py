"""Continue prompts: `[torchrun --nproc-per-node N] generate.py CHECKPOINT --prompt TEXT [parallel.tp=2 ...]`."""

from meshtron.cli import generate_main

if __name__ == "__main__":
    generate_main()
