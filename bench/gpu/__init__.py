"""The parts of bench/gpu_check.sh: one module each, run by driver.py in a process of its own."""
