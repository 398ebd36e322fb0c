"""Measurements on the user's own machine: foundling compared with other libraries."""
