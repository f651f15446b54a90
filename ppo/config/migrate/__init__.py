"""Configurations of other trainers, as they are there, into ours; see README.md."""
