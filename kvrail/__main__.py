"""`python -m kvrail`: the command line where no script of that name is on the path."""

from kvrail.services.cli.main import main

raise SystemExit(main())
