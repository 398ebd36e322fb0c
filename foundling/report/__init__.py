"""Reads run directories only and shows how a model was raised. No torch."""

from foundling.report.compare import compare_runs, describe_comparison
from foundling.report.curves import BinWidth
from foundling.report.listing import describe_run, list_runs, show_run
from foundling.report.page import write_report
from foundling.report.tree import draw_tree, lineage

__all__ = [
    "BinWidth",
    "compare_runs",
    "describe_comparison",
    "describe_run",
    "draw_tree",
    "lineage",
    "list_runs",
    "show_run",
    "write_report",
]
