"""`k3-bench`: one file per subcommand."""
