"""Reads run directories only and shows how a model was raised. No torch."""

from foundling.report.listing import describe_run, list_runs, show_run
from foundling.report.page import write_report

__all__ = ["describe_run", "list_runs", "show_run", "write_report"]
