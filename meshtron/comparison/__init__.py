"""Do the numbers depend on the layout? Train a few steps at several layouts and compare everything.

``meshtron parity RECIPE --layouts "1x1x1,2x2x2"`` does it for a recipe, ``meshtron.parity`` for a model of your own:

    subject.py   what is compared: one rank's part of a training run
    worker.py    runs in every rank: takes the steps, writes gradients and weights by full name
    launch.py    starts the ranks of each layout with torchrun
    report.py    compares the files with those of the first layout
"""

from meshtron.comparison.launch import Variant, compare_recipe, parity, parse_variants
from meshtron.comparison.report import TOLERANCES, Divergence, Outcome, Report, print_report
from meshtron.comparison.subject import Subject

__all__ = [
    "TOLERANCES",
    "Divergence",
    "Outcome",
    "Report",
    "Subject",
    "Variant",
    "compare_recipe",
    "parity",
    "parse_variants",
    "print_report",
]
