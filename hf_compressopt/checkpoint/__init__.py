"""Saves and loads of optimizer state by any number of ranks, and the adapters for each optimizer."""
