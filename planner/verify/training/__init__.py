"""How the shipped family was made: `python -m planner.verify.training --help`."""
