"""The training loop and its parts; :mod:`sagc_fast.train.trainer` is the place to start reading."""
