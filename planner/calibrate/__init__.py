"""Measurements to profiles: readers of public kernel tables, robust fits of the kernel models, errors of the fits."""
