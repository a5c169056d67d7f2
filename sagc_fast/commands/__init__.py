"""One module per command of ``sagc-fast``; see :mod:`sagc_fast.cli` for what a module offers."""
