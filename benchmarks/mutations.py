"""Break one guarantee at a time in a copy of the tree, and see the test that holds it fail.

    python benchmarks/mutations.py [--only WORD]

Each line of ``MUTATIONS`` is applied by itself. The exit status is 1 if a test still passes, or if the code that a
mutation changes is no longer there. The table goes into docs/parity.md.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from checkpoint_mutations import CHECKPOINT_MUTATIONS

ROOT = Path(__file__).parent.parent
_COPIED = ("meshtron", "tests", "recipes", "examples", "pyproject.toml", "train.py", "generate.py")


@dataclass(frozen=True)
class Mutation:
    """One mistake, and the test that must notice it."""

    what: str
    file: str
    old: str
    new: str
    test: str


_LAYOUT = "tests/test_layouts.py::test_every_layout_equals_one_plain_process"
_OPTION = "tests/test_layouts.py::test_options_equal_one_plain_process"
MUTATIONS = (
    Mutation(
        "gradients of tied copies on two pipeline ranks are not summed",
        "meshtron/parallel/gradients.py",
        "        gradient.add_(other)\n",
        "",
        f"{_OPTION} -k 'tie_word_embeddings and 1F1B'",
    ),
    Mutation(
        "both copies of a tied parameter count in the norm",
        "meshtron/parallel/zero.py",
        "        if piece.is_copy:\n            return False\n",
        "",
        f"{_OPTION} -k 'tie_word_embeddings and 1F1B'",
    ),
    Mutation(
        "gradients of a weight pass are not collected",
        "meshtron/parallel/zero.py",
        "        self.stages.after_weight_pass.append(self.collect)\n",
        "",
        "tests/test_guarantees.py -k materialisation",
    ),
    Mutation(
        "parameters replicated over tp count on every tp rank in the norm",
        "meshtron/parallel/zero.py",
        "(sharded_over_tp or self._tp.rank == 0) and",
        "True and",
        f"{_LAYOUT}[1x1x2]",
    ),
    Mutation(
        "the norm is not summed over ranks",
        "meshtron/parallel/clip.py",
        "        if axis.size > 1:\n            dist.all_reduce(total, op",
        "        if axis.size > 99:\n            dist.all_reduce(total, op",
        f"{_LAYOUT}[1x2x1]",
    ),
    Mutation(
        "the largest gradient is not sought on other ranks",
        "meshtron/parallel/clip.py",
        "        if axis.size > 1:\n            dist.all_reduce(total, op",
        "        if axis.size > 1 and not infinite:\n            dist.all_reduce(total, op",
        "tests/test_combinations.py::test_every_pair_of_options_equals_plain_torch[2]",
    ),
    Mutation(
        "the norm of a large matrix is summed in one go on a CPU",
        "meshtron/kernels/adamw.py",
        "vector_norm(tensor, dim=-1, dtype",
        "vector_norm(tensor, dtype",
        "tests/test_adamw.py -k sum_of_squares",
    ),
    Mutation(
        "gradients of sequence parallel norms are not summed over tp",
        "meshtron/parallel/gradients.py",
        "        self._sum_partial_over_tp()\n",
        "",
        f"{_LAYOUT}[1x1x2]",
    ),
    Mutation(
        "the loss is divided by the number of micro-batches once more",
        "meshtron/loss.py",
        "        return total / self.denominator",
        "        return total / self.denominator / 2",
        f"{_LAYOUT}[1x1x2]",
    ),
    Mutation(
        "each dp rank divides by its own valid tokens",
        "meshtron/passes.py",
        '        dist.all_reduce(valid, group=job.mesh.get_group("dp"))',
        "        pass",
        "tests/test_combinations.py::test_every_pair_of_options_equals_plain_torch[2]",
    ),
    Mutation(
        "parameters are not gathered after the step",
        "meshtron/parallel/buckets.py",
        "                piece.local[span].view(view.shape).copy_(view)",
        "                pass",
        f"{_LAYOUT}[1x2x1]",
    ),
    Mutation(
        "documents see their neighbours",
        "meshtron/models/documents.py",
        "    return same.tril()[:, None]",
        "    return torch.ones_like(same).tril()[:, None]",
        "tests/test_documents.py -k neighbour",
    ),
    Mutation(
        "biases and norms decay",
        "meshtron/optim.py",
        '{} if len(shape) >= 2 else {"weight_decay": 0.0}',
        "{}",
        "tests/test_combinations.py::test_every_pair_of_options_equals_plain_torch[1]",
    ),
    Mutation(
        "initial weights depend on the rank",
        "meshtron/initialize.py",
        'f"{seed}/{name}/{block}"',
        'f"{seed}/{name}/{block}/{torch.distributed.is_initialized() and torch.distributed.get_rank()}"',
        "tests/test_layouts.py::test_initial_weights_are_bit_equal_at_all_layouts",
    ),
    Mutation(
        "random streams differ within a tp group",
        "meshtron/seeds.py",
        "(seed, step, *coordinates)",
        "(seed, step, torch.distributed.get_rank())",
        "tests/test_guarantees.py -k dropout",
    ),
    Mutation(
        "what fills up rows of logits between tp ranks can be chosen as a token",
        "meshtron/generate/engine.py",
        "part[:, :size] for part, size",
        "part for part, size",
        "tests/test_padding.py",
    ),
    Mutation(
        "a weight pass computes recomputed layers again",
        "meshtron/build.py",
        "        split_backward=not whole_backward,\n",
        "",
        "tests/test_guarantees.py -k zero_bubble",
    ),
    Mutation(
        "only eight layers that differ are compiled",
        "meshtron/layers.py",
        "max(config.recompile_limit, 8 * len(layers))",
        "8",
        "tests/test_compile.py -k alike",
    ),
    Mutation(
        "layers share no compiled code",
        "meshtron/layers.py",
        "        if (kind, method, prefix) not in _subclasses:",
        "        if True:",
        "tests/test_compile.py",
    ),
    Mutation(
        "a step without labels moves weights by weight decay",
        "meshtron/loop.py",
        "only_if=finite & (norm != 0)",
        "only_if=finite",
        "tests/test_labels.py",
    ),
    *(Mutation(*row) for row in CHECKPOINT_MUTATIONS),
)


def fails(mutation: Mutation) -> bool:
    """Whether the test notices the mistake."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in _COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, tree / name)
        file = tree / mutation.file
        text = file.read_text(encoding="utf-8")
        if text.count(mutation.old) != 1:
            sys.exit(f"error: {mutation.file} has {text.count(mutation.old)} places like {mutation.old!r}, not 1")
        file.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", *shlex.split(mutation.test)]
        environment = os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
        if ended.returncode not in (0, 1):  # 1: tests were run and one failed
            sys.exit(f"error: {mutation.test} did not run:\n{ended.stdout}{ended.stderr}")
        return ended.returncode == 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mutations whose description, file or test has this in it")
    options = parser.parse_args()
    unnoticed = 0
    for mutation in MUTATIONS:
        if any(options.only in text for text in (mutation.what, mutation.file, mutation.test)):
            noticed = fails(mutation)
            unnoticed += not noticed
            print(f"| {mutation.what} | `{mutation.test}` | {'fails' if noticed else 'STILL PASSES'} |", flush=True)
    sys.exit(unnoticed > 0)


if __name__ == "__main__":
    main()
