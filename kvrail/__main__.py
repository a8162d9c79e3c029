"""`python -m kvrail`: the command line where no script of that name is on the path."""

from kvrail.cli.main import main

raise SystemExit(main())
