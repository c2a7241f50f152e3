"""Measurements, each a function that returns plain data: contenders timed in turn, as ratios."""
