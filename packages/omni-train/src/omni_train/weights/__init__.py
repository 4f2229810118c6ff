"""Weights in and out of a trained module, and copies of them."""
