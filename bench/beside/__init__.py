"""The parts of bench/side_by_side.py: programs, engines, what is done to them, and what is told of it."""
