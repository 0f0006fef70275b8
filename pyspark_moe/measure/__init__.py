"""Measuring a model with its text: calibrate, validate, bench. What computes runs in child processes, which may die or stall."""
