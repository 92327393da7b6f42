"""`python3 -m enginewatch.guard SUB ...`."""

from enginewatch.guard.main import main

main()
