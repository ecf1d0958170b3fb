"""Predictions of a step's memory, bytes and time, before a machine is rented."""
