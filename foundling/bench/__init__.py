"""Measurements on the user's own machine: what foundling does beside what others do."""
