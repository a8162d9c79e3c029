"""Commands that talk to a running cluster over HTTP."""
