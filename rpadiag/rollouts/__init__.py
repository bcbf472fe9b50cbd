"""Recorded rollouts: token ids and log-probabilities as RL trainers write them, read by the batch and checked before they are compared.

:mod:`rpadiag.rollouts.schemas` says where each trainer keeps what, :mod:`rpadiag.rollouts.files` reads JSON Lines and Parquet without
loading them whole, :mod:`rpadiag.rollouts.batch` lays every schema out the same way, and :mod:`rpadiag.rollouts.faults` recognises data that only look like a numerics
mismatch.
"""
