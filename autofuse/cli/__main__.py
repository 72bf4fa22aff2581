"""`python -m autofuse.cli`."""

from . import main

main()
