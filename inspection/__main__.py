"""`python -m inspection` is the command `slime-verlog`."""

from inspection.command import main

main()
