"""How the help looks: panels of commands and options, examples, and no types beside flags."""

from __future__ import annotations

from typing import Any

import typer

COMMAND_PANELS = {
    "Train": ("train", "evaluate", "table", "claims"),
    "Label pictures": ("label", "review", "suggest"),
    "Use a model": ("predict", "serve", "export"),
    "Look at results": ("runs", "report", "probe", "distances", "figure"),
    "Data and settings": ("data", "show"),
}
OPTION_PANELS = {
    "Data": ("setting", "splits", "split", "labels", "from_", "image_size", "data_dir", "records", "code"),
    "Training": ("method", "recipe", "backbone", "network", "minutes", "steps", "policy", "seed", "baseline", "set_", "config"),
    "Speed": ("device", "precision", "compile", "recompute", "engine", "jobs", "ray_address", "cpus_per_run"),
    "Output": ("out", "name", "tracker", "tensorboard", "format_", "save", "json_"),
}
"""Panel -> names of parameters. Other options stay in the panel "Options"."""
MANY = 10
"""A command with at most this many options has them in one panel."""
EXAMPLES = {
    "crmatch": (
        "crmatch train digits@4 --baseline    # with and without unlabeled images",
        "crmatch train my-photos              # your own pictures",
        "crmatch report                       # one page about all runs",
    ),
    "train": (
        "crmatch train my-photos                   # your own pictures",
        "crmatch train digits@4 --method fixmatch  # 4 labels of each digit",
        "crmatch train cifar10@4 --recipe quick    # minutes instead of months",
    ),
    "label": (
        "crmatch label my-photos               # the first labels",
        "crmatch label runs/my-photos/round1   # what that model suggests",
        "crmatch label latest --train          # then train the next round",
    ),
    "predict": (
        "crmatch predict RUN new-photos --out predictions.csv",
        "crmatch predict RUN photo.jpg --probabilities",
        "crmatch predict RUN new-photos --abstain 0.8   # no class below 80 %",
    ),
    "table": (
        "crmatch table ablation --setting digits@4 --splits 1-3",
        "crmatch table main-cifar --dry-run   # what it would train and cost",
        "crmatch table ablation --setting digits@4 --format latex --save a.tex",
    ),
    "claims": (
        "crmatch claims main ablation --setting digits@4 --splits 1-3",
        "crmatch claims --setting cifar10@4 --recipe quick --dry-run",
        "crmatch claims --records runs        # a page from what is finished",
    ),
}
"""Command -> three examples that fit into 80 columns."""


def arrange(command: Any, name: str = "crmatch") -> None:
    """Arrange the help of a command and of the commands below it."""
    options = command.get_params(typer.Context(command))
    panels = {option: panel for panel, names in OPTION_PANELS.items() for option in names}
    for option in options:
        if getattr(option, "is_flag", False):
            option.metavar = ""
        if option.param_type_name == "option" and len(options) > MANY:
            option.rich_help_panel = panels.get(option.name)
    if name in EXAMPLES:
        command.epilog = "\n".join(["Examples:", *EXAMPLES[name]])
    places = {inner: panel for panel, names in COMMAND_PANELS.items() for inner in names}
    for inner, below in getattr(command, "commands", {}).items():
        if name == "crmatch":
            below.rich_help_panel = places.get(inner)
        arrange(below, inner)
