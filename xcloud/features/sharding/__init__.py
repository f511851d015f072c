"""Stages that the ranks of a cloud share because they do not fit one."""
