"""Synthetic mixture-of-experts models: random weights in the shapes of real architectures."""
